"""The console command: a table from verb to function, none of which is imported until it is run.

    umm-reflect --help
    umm-reflect VERB --help
    umm-reflect VERB ... [--debug]           # --debug: the traceback of an error

A verb's function takes its arguments as a list and returns the exit code. `run_program` around it
turns what can go wrong outside the code into one line on stderr:

    0  done          1  failed (a file, a disk, a service, the model)          2  typed wrongly
    130  interrupted (Ctrl-C)          143  ended by SIGTERM
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from umm_reflect.errors import UsageError, UserError


class Verb(NamedTuple):
    """Where a verb's function is, and what it does."""

    target: str  # "module:function"
    summary: str


VERBS = {
    "reflect": Verb("agent.cli:reflect_main", "draw, look, say what is wrong, edit, stop"),
    "generate": Verb("agent.cli:generate_main", "draw one picture, without looking at it"),
    "edit": Verb("agent.cli:edit_main", "change a picture by one instruction"),
    "demo": Verb("agent.demo:main", "the loop in a browser, on this machine"),
    "data": Verb("sft.data_cli:main", "trajectories: example, check, stats, show, convert"),
    "sft": Verb("sft.train:main", "train on trajectories"),
    "rl": Verb("rl.train:main", "train on rewards"),
    "merge": Verb("umm_reflect.merge:main", "a base and an adapter: one model folder, checked"),
    "eval": Verb("eval.run:main", "generate a test set, judge it, write result files"),
    "collect": Verb("eval.collect_cli:main", "own images, judged: trajectories to learn from"),
    "geneval": Verb("eval.geneval_cli:main", "GenEval: prompts, training pools, weights"),
    "reward": Verb("eval.reward_cli:main", "is a judge fit for use (check); judge images (score)"),
    "serve-reward": Verb("eval.server:main", "a judge behind HTTP, for trainers elsewhere"),
    "doctor": Verb("umm_reflect.doctor:main", "versions, devices, what is missing; memory plan"),
    "download": Verb("umm_reflect.download:main", "fetch a model and what it needs, checked"),
    "parity": Verb("umm_reflect.parity:main", "compare this code with a golden folder"),
}


# --- the table ------------------------------------------------------------------------------------


def available() -> dict[str, Verb]:
    """The verbs whose module lies beside this package. Looks at files, imports nothing."""
    root = Path(__file__).resolve().parent.parent
    return {
        name: verb
        for name, verb in VERBS.items()
        if (root / verb.target.partition(":")[0].replace(".", "/")).with_suffix(".py").exists()
    }


def help_text() -> str:
    verbs = available()
    width = max(map(len, verbs), default=0)
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.items()]
    return "\n".join(
        [
            "usage: umm-reflect VERB [arguments]        umm-reflect VERB --help",
            "",
            "One model draws a picture, looks at it, says what is wrong, edits it, and stops",
            "when it is right.",
            "",
            *lines,
            "",
            "Every verb takes --config FILE.yaml, --show-config and --debug.",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Run the verb in argv[0]; returns the exit code. Errors: UsageError for an unknown verb."""
    verbs = available()
    if not argv:
        print(help_text(), file=sys.stderr)
        return 2
    verb, *rest = argv
    if verb in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if verb in ("-V", "--version"):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"umm-reflect {version('umm-reflect')}")
        except PackageNotFoundError:
            print("umm-reflect, from a checkout that is not installed")
        return 0
    if verb not in verbs:
        close = difflib.get_close_matches(verb, verbs, n=1)
        raise UsageError(
            f"there is no verb '{verb}'",
            f"Did you mean '{close[0]}'?" if close else f"Choose one of {', '.join(verbs)}.",
        )
    module, _, function = verbs[verb].target.partition(":")
    return getattr(importlib.import_module(module), function)(rest) or 0


def entry() -> NoReturn:
    """The console command."""
    sys.exit(run_program(main, sys.argv[1:]))


# --- errors ---------------------------------------------------------------------------------------


class Terminated(BaseException):
    """SIGTERM arrived: unwinds like Ctrl-C, so that half-written files are removed."""


def run_program(program: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Run a program and return its exit code; what fails outside the code becomes one line.

    --debug anywhere in argv (before `--`) is taken out and shows the traceback as well. An error
    that is ours (an assert, a TypeError, ...) is not caught: its traceback is what is needed.
    """
    before_stop = argv[: argv.index("--")] if "--" in argv else argv
    debug = "--debug" in before_stop
    rest = [word for word in before_stop if word != "--debug"] + list(argv[len(before_stop) :])
    try:
        with _sigterm_as_exception():
            code = program(rest)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        line, code = "interrupted; nothing half-written is left behind", 130
    except Terminated:
        line, code = "ended by SIGTERM; nothing half-written is left behind", 143
    except BrokenPipeError:  # the reader (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        described = describe(error)
        if described is None:
            raise
        line, code = described
        if debug:
            traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"error: {line}" if code in (1, 2) else line, file=sys.stderr)
    return code


def describe(error: Exception) -> tuple[str, int] | None:
    """(one line, exit code) for an error that a person can act on; None for a bug of ours."""
    if isinstance(error, UserError):
        return _single_line(str(error)), error.exit_code
    if isinstance(error, FloatingPointError):  # weights that are no numbers
        return _single_line(str(error)), 1
    no_memory = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    if no_memory or "DefaultCPUAllocator: can't allocate memory" in str(error):
        remedy = (
            "Draw smaller (--size), fewer at a time (--batch-size), or see what fits: "
            "umm-reflect doctor --plan --model MODEL"
        )
        return f"out of memory ({_single_line(str(error))[:120]}). {remedy}", 1
    if isinstance(error, ImportError) and error.name:
        return _missing_module(error)
    if isinstance(error, OSError):
        return _os_error(error), 1
    if isinstance(error, ValueError):
        return f"{_single_line(str(error))} (--debug shows where)", 1
    return None


_EXTRA_OF_MODULE = {
    "accelerate": "train",
    "datasets": "train",
    "pyarrow": "train",
    "deepspeed": "deepspeed",
    "tensorboard": "trackers",
    "wandb": "trackers",
    "gradio": "serve",
    "fastapi": "serve",
    "uvicorn": "serve",
    "vllm": "vllm",
    "rapidocr": "ocr",
    "onnxruntime": "ocr",
}


def _missing_module(error: ImportError) -> tuple[str, int] | None:
    extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
    if not isinstance(error, ModuleNotFoundError) or extra is None:
        return None
    return f"{error.name} is not installed. Install the extra: pip install -e '.[{extra}]'", 1


def _os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    what = (error.strerror or _single_line(str(error)) or type(error).__name__).lower()
    remedies = {
        errno.ENOSPC: "Free some space, or write elsewhere (--output-dir).",
        errno.EDQUOT: "Free some space, or write elsewhere (--output-dir).",
        errno.EROFS: "Write elsewhere (--output-dir).",
        errno.EACCES: "Check the permissions, or write elsewhere (--output-dir).",
        errno.ENOENT: "Check the path.",
        errno.ENOTDIR: "Check the path: a part of it is a file.",
        errno.EEXIST: "Check the path: it is a file.",
        errno.EISDIR: "Check the path: it is a folder.",
    }
    return f"{what}{where}. {remedies.get(error.errno or 0, '(--debug shows where)')}"


def _single_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def stop(signum: int, frame: object) -> NoReturn:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever started this one handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
