"""The built-in world: scenes of coloured shapes (scene), pictures of them (render), prompts, lots and test sets."""
