"""The built-in world: scenes of coloured shapes, their pictures, prompts, lots and test sets."""
