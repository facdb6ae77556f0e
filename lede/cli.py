"""The command line: `lede COMMAND`, one frozen dataclass of settings a command.

Commands are imported when they run, so that `lede --help` is instant and serving needs no training package.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, runtime_checkable

USAGE_ERROR = 2
INTERRUPTED = 130

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXTRAS = {
    "gymnasium": "collect",
    "zarr": "collect",
    "d3rlpy": "train",
    "h5py": "train",
    "minari": "minari",
    "ray": "ray",
    "tensorboard": "train",
    "matplotlib": "train",
    "rouge_score": "bench",
    "sklearn": "bench",
    "gguf": "gguf",
    "accelerate": "gguf",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
}


@dataclass(frozen=True)
class Command:
    """Where a command lives."""

    module: str
    """Module that holds it."""
    config: str
    """Dataclass of its settings, whose fields are the flags."""
    run: str
    """Function that takes the settings."""
    help: str
    """What it does, in a line."""


@runtime_checkable
class Verdict(Protocol):
    """What a command returns that can be done and yet end badly, as a test run can."""

    @property
    def exit_code(self) -> int:
        """What to end with."""


COMMANDS: dict[str, Command] = {
    "demo": Command("lede.demo.run", "DemoConfig", "demo", "collect, train and decode on the bundled model"),
    "collect": Command("lede.collectors", "CollectConfig", "collect", "record experience or traces into a store"),
    "train": Command("lede.sweep", "SweepConfig", "train_or_sweep", "train a policy offline from a store"),
    "deploy": Command("lede.deployment", "DeployConfig", "deploy", "decode prompts under a policy"),
    "verify": Command("lede.verifying", "VerifyConfig", "run_verify", "say whether texts are the plain model's"),
    "export": Command("lede.exporting", "ExportConfig", "export", "write a policy's network as ONNX"),
    "profile": Command("lede.profiling", "ProfileConfig", "profile", "measure what decoding costs on this machine"),
    "compile": Command("lede.compiling", "CompileConfig", "run_compile", "compile a model's layers ahead of time"),
    "phrases": Command("lede.phrase_making", "PhrasesConfig", "make_phrases", "remember what other texts went on with"),
    "evaluate": Command("lede.evaluation", "EvaluateConfig", "evaluate", "say how fast policies would be, and why"),
    "bench": Command("lede.bench", "BenchConfig", "run_bench", "measure policies and rivals side by side"),
    "compare": Command("lede.comparison", "CompareConfig", "compare", "say how two benchmark reports differ"),
    "buffer info": Command("lede.buffers.inspection", "InfoConfig", "show_info", "say what a store holds"),
    "buffer check": Command("lede.buffers.checking", "CheckConfig", "check_buffer", "find damage in a store"),
    "buffer repair": Command("lede.buffers.repairing", "RepairConfig", "repair_buffer", "drop what is damaged"),
    "buffer merge": Command("lede.buffers.merging", "MergeConfig", "merge_buffers", "make one store of several"),
    "buffer split": Command("lede.buffers.splitting", "SplitConfig", "split_buffer", "hold out a part of a store"),
    "buffer export": Command(
        "lede.buffers.exporting", "ExportConfig", "export_buffer", "write d3rlpy's or Minari's files"
    ),
    "buffer import": Command("lede.buffers.importing", "ImportConfig", "import_buffer", "make a store of such files"),
    "env": Command("lede.environment", "EnvConfig", "show_environment", "print versions and devices for bug reports"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 when done, or what the command's verdict says (1 where `lede verify` finds a failure); 2 after a user error
        (told in one line on stderr), 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        from lede import __version__

        print(f"lede {__version__}")
        return 0
    name, rest = _split(arguments)
    if name is None:
        family = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
        if family and arguments[1:2] in ([], ["-h"], ["--help"]):
            print(usage(family))
            return 0 if arguments[1:] else USAGE_ERROR
        told = " ".join(arguments[: 2 if family else 1])
        return _fail(f"there is no command '{told}'; commands are {', '.join(family or COMMANDS)}")
    config_class: Any = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            command = COMMANDS[name]
            module = importlib.import_module(command.module)
            config_class = getattr(module, command.config)
            config = _parse(config_class, f"lede {name}", rest, command.help)
            run: Callable[[Any], object] = getattr(module, command.run)
            done = run(config)
    except _UsageError as error:
        return error.code if not str(error) else _fail(_with_flags(str(error), config_class))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the reader left: keep silent, at exit too
        return 0
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        return _fail(f"`lede {name}` needs the package {error.name}: pip install 'lede-rl[{extra}]'")
    except (ValueError, OSError) as error:
        return _fail(_with_flags(str(error), config_class))
    return done.exit_code if isinstance(done, Verdict) else 0


def usage(names: Sequence[str] = tuple(COMMANDS)) -> str:
    """The list of commands, or of some of them."""
    width = max(map(len, names))
    rows = "\n".join(f"  {name:<{width}}  {COMMANDS[name].help}" for name in names)
    return (
        "lede: early-exit self-speculative decoding with learned policies\n\n"
        f"usage: lede COMMAND [OPTIONS]\n\n{rows}\n\n`lede COMMAND --help` lists the options of a command."
    )


class _UsageError(Exception):
    """Options that don't parse, or a request for help (no message)."""

    def __init__(self, message: str, code: int = USAGE_ERROR) -> None:
        super().__init__(message)
        self.code = code


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The command and its options; a command may be two words."""
    for n_words in (2, 1):
        name = " ".join(arguments[:n_words])
        if len(arguments) >= n_words and name in COMMANDS:
            return name, arguments[n_words:]
    return None, arguments


def _parse(config_class: Any, prog: str, arguments: list[str], description: str) -> Any:
    """Read flags into the dataclass; a complaint of the parser becomes one line."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(config_class, args=arguments, prog=prog, description=description)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else USAGE_ERROR
        if not code:
            raise _UsageError("", 0) from None
        raise _UsageError(f"{_one_line(complaint.getvalue())}; see {prog} --help") from None


def _one_line(text: str) -> str:
    """The first part of a message of the option parser, without its title, box, colours and class names.

    The box is drawn in Unicode, its title in the upper edge, or in ASCII, with a title and a rule below it.
    """
    parts: list[list[str]] = [[]]
    for line in _COLOUR.sub("", text).splitlines():
        bare = line.strip("│╭╮╰╯ ")
        if line.startswith("╭") or (bare and not bare.strip("─-")):
            parts.append([])
        elif bare:
            parts[-1].append(bare)
    said = parts[1] if len(parts) > 1 else parts[0]
    return re.sub(r"^Error parsing \w+: ", "", " ".join(" ".join(said).split()))


def _with_flags(message: str, config_class: Any) -> str:
    """A message of the library with the settings named as the user types them."""
    for name in getattr(config_class, "__dataclass_fields__", ()):
        if "_" in name:
            message = re.sub(rf"(?<![\w/.\\-]){name}(?![\w/.\\-])", f"--{name.replace('_', '-')}", message)
    return message


def _fail(message: str) -> int:
    print(f"lede: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"lede: warning: {' '.join(str(message).split())}", file=file or sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
