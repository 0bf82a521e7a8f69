"""The command line: ``limen VERB [overrides]``.

Parsing, help and every check of the configuration come before torch, Ray, vLLM or DeepSpeed is imported; a verb's own module is
imported when it is about to run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

from configs.build import schema_keys
from configs.compose import dump_config, load_config, shipped_files
from configs.errors import InputError
from configs.schema import Config
from orchestrator.errors import RunStopped

EXIT_BAD_INPUT, EXIT_STOPPED, EXIT_SIGINT = 2, 3, 130
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EPIPE}


@dataclass(frozen=True)
class Verb:
    """One verb: what help says of it, and the function that does it, as ``module:function``."""

    summary: str
    detail: str
    function: str
    takes_config: bool = True
    argument: str = ""  # what a verb without a configuration takes: RUN, or [RUN] where it may be left out
    checks_functions: bool = True  # the functions it chooses: that imports torch, which a verb without them can spare
    refuses: bool = True  # combinations that cannot mean what they say
    flags: tuple[str, ...] = ()  # options of its own, each with a value
    flagged: str = ""  # what does it where one of them is given: ``module:function`` of the flags, the overrides and --config-dir


VERBS = {
    "train": Verb(
        "train a model; without overrides the embedded job",
        "Trains, writes the run's folder, and prints the held-out pass rate before and after. Without overrides: additions of up to\n"
        "three digits on a tiny model that is built here first. `limen train resume=RUN_DIR` goes on with a run; further\n"
        "overrides then change its stored configuration.",
        "orchestrator.commands:train",
    ),
    "build-model": Verb(
        "build and cache the base model",
        "Builds the embedded model, or fine-tunes `model.path` on `model.warm_start_file`, keeps it in a cache, and prints its folder.",
        "orchestrator.commands:build_model",
    ),
    "eval": Verb(
        "pass@k and avg@k of a checkpoint on held-out prompts",
        "Evaluates `checkpoint_dir`, or the base model without one, on the held-out prompts of the configuration.",
        "orchestrator.asking:evaluate_model",
    ),
    "sample": Verb(
        "completions of a checkpoint",
        "Prints completions of `checkpoint_dir`, or of the base model without one, for `sample.prompts`, else for held-out prompts.",
        "orchestrator.asking:sample",
    ),
    "score": Verb(
        "score completions by a reward, without training",
        "Reads JSON lines and writes one line for each, in order: `limen score reward=math < in.jsonl > out.jsonl`, or input= and output=.\n"
        "In: `completion`, `answer` (any JSON), and where a verifier asks for them `prompt` (ends where the completion begins),\n"
        "`num_tokens`, `source`, `id`; `options` are the verifier's own parameters for this line, {part: {...}} where the reward has\n"
        "several parts. Out: `value`, `accuracy`, `status`, `outcome`, `parts`, `extracted`, `time_s`, `detail`, behind all keys but\n"
        "completion, answer, prompt and options. A summary goes to stderr. A line that cannot be used ends it with 2, behind the lines\n"
        "before it; a status whose policy is `fail` with 3.\n"
        "  --compare OVERRIDES  a second reward: --compare 'reward=exact'. Writes the lines on which the two disagree.",
        "orchestrator.score:score",
        checks_functions=False,
        refuses=False,
        flags=("--compare",),
        flagged="orchestrator.score:compare",
    ),
    "serve-reward": Verb(
        "a reward as an HTTP service",
        "Scores batches over HTTP: POST /score, GET /health; keys `serve.*`. The `http` reward of another run is its client.",
        "orchestrator.serve:serve_reward",
        checks_functions=False,
        refuses=False,
    ),
    "explain": Verb(
        "the objective of a configuration as a formula, and its credit at a grid of ratios",
        "Prints the objective in use as one formula with its numbers and sources, the pipeline it passes through, factor and credit at a\n"
        "grid of ratios and just beside every edge, and the rules that refuse the combination, if any. Starts nothing.\n"
        "  --on RUN             the credit on the tokens of a run recorded with rollout.record=true, in place of the grid: its objective,\n"
        "                       changed by the overrides. The ratio is 1, or with checkpoint_dir=MODEL that model against the record.\n"
        "  --against OVERRIDES  a second scheme beside it: --against 'algorithm=grpo weighting=magnitude'",
        "orchestrator.explain:explain",
        checks_functions=False,
        refuses=False,  # it names them
        flags=("--on", "--against"),
        flagged="orchestrator.explain_run:explain_run",
    ),
    "plan": Verb(
        "what a run takes, worked out before it starts",
        "Prints placement, batch arithmetic, memory by role and device, bytes and seconds of a push, staleness and threads, for this\n"
        "machine or the machines of the `plan` keys (`plan.num_gpus=16`). Refuses what cannot fit and names the smallest change that\n"
        "does. Starts nothing and is offline. Where the counts of workers and ranks are all 1 and there are GPUs, it proposes them.",
        "orchestrator.plan:plan",
        checks_functions=False,
    ),
    "doctor": Verb(
        "check this machine and its versions; with a run's folder, what that run is doing",
        "Checks Python, the versions of the packages and whether they load, the machine's memory, limits, ports, compiler, GPU and\n"
        "ways to lock a process in, and names a fix for whatever is wrong. Exits with 2 where something is. Starts no run and takes no\n"
        "overrides. `limen doctor RUN` reads the folder of a run that goes on or has ended instead, and says in words what it is doing or\n"
        "was doing: last step, stage, who waits for whom, what was lost and replaced, alarms, last checkpoint, and what to do next.",
        "orchestrator.doctor:doctor",
        takes_config=False,
        argument="[RUN]",
    ),
    "ledger": Verb(
        "what became of every prompt visit of a run",
        "Reads the folder of a run that goes on or has ended: visits by what became of them and why, prompts by stratum and by where their\n"
        "estimated pass rate lies, visits that have been open for long, and work that a return to a checkpoint discarded.",
        "orchestrator.ledger_view:ledger",
        takes_config=False,
        argument="RUN",
    ),
}

OPTIONS = """options:
  --config-dir DIR   a folder of your own YAML: DIR/experiment/mine.yaml is `experiment=mine`, DIR/data/own.yaml is `data=own`
  --print-config     print the whole configuration, secrets hidden, and stop
  -h, --help         this text
"""

EXIT_CODES = """exit codes: 0 done; 2 bad configuration or input; 3 the run stopped itself, the reason last; 130 after Ctrl-C; 143 after SIGTERM;
129 where the terminal was closed
"""

EXAMPLES = """examples:
  limen train
  limen train model=pretrained model.path=FOLDER data=jsonl data.sources.main.path=FILE.jsonl
  limen plan model=qwen3_8b plan.num_gpus=8
  limen explain algorithm=aspo_archer
  limen eval checkpoint_dir=RUN_DIR evaluation.num_samples=8
  limen score reward=math < completions.jsonl > scores.jsonl
"""


@dataclass
class Call:
    """What was asked for."""

    verb: str | None = None
    overrides: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    print_config: bool = False
    help: bool = False
    flags: dict[str, str] = field(default_factory=dict)  # of the verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. An error about what the user gave is one line on stderr."""
    if sys.stderr is None:  # the process was started with it closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    return _written(_exit_code(argv))


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        return _run(parse(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        _complain(str(error))
        return EXIT_BAD_INPUT
    except RunStopped as error:
        _complain(f"stopped: {error}")
        return EXIT_STOPPED
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _complain(f"stopped: {error}")
        return EXIT_STOPPED
    except KeyboardInterrupt:  # before or after the loop, which has its own way to stop and save
        _complain("interrupted")
        return EXIT_SIGINT


def _written(code: int) -> int:
    """The exit code, once what was printed is out. Where a full disk (a pipe that is closed) refuses it, Python would try again at its end and
    exit with 120: nobody sees the reason then."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0:
            _complain(f"stopped: not all of the output could be written: {error}")
            return EXIT_STOPPED
    return code


def parse(argv: Sequence[str]) -> Call:
    """Split the arguments into verb, options and overrides. Raises InputError for an unknown verb or option."""
    call, rest = Call(), list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument in ("-h", "--help"):
            call.help = True
        elif argument == "--print-config":
            call.print_config = True
        elif name == "--config-dir":
            if not equals and not rest:
                raise InputError("--config-dir needs a folder: --config-dir DIR")
            call.config_dir = Path(value if equals else rest.pop(0)).expanduser()
        elif call.verb is not None and name in VERBS[call.verb].flags:
            if not equals and not rest:
                raise InputError(f"{name} needs a value; `limen {call.verb} --help` has an example")
            call.flags[name] = value if equals else rest.pop(0)
        elif argument.startswith("-"):
            own = VERBS[call.verb].flags if call.verb else ()
            raise InputError(
                f"unknown option {argument}; there are {', '.join([*own, '--config-dir', '--print-config', '--help'])}"
            )
        elif call.verb is None:
            if argument not in VERBS:
                near = "; overrides come after the verb" if equals else ""
                raise InputError(f"unknown verb {argument!r}; there are {', '.join(VERBS)}{near}")
            call.verb = argument
        else:
            call.overrides.append(argument)
    return call


def _run(call: Call) -> int:
    if call.verb is None:
        if call.help:
            print(overview(), end="")
            return 0
        raise InputError(f"name a verb: {', '.join(VERBS)}; `limen --help` explains them")
    verb = VERBS[call.verb]
    if call.help:
        print(describe(call.verb), end="")
        return 0
    if not verb.takes_config:
        return int(resolve_name(verb.function)(*_plain_arguments(call, verb)))
    if call.flags:
        return int(resolve_name(verb.flagged)(call.flags, call.overrides, call.config_dir))
    config = load_config(call.overrides, call.config_dir, combinations=verb.refuses)
    if call.print_config:
        print(dump_config(config, redact=True), end="")
        return 0
    if verb.checks_functions:
        resolve_name("orchestrator.choices:check_functions")(config)
    return int(resolve_name(verb.function)(config))


def _plain_arguments(call: Call, verb: Verb) -> list[Path]:
    """The run's folder, of a verb that takes no configuration."""
    least, most = int(verb.argument == "RUN"), int(bool(verb.argument))
    if call.config_dir or call.print_config or not least <= len(call.overrides) <= most:
        takes = (
            f"takes the folder of a run and nothing else: limen {call.verb} {verb.argument}"
            if most
            else "takes no options or overrides"
        )
        raise InputError(f"limen {call.verb} {takes}")
    return [Path(text).expanduser() for text in call.overrides]


def overview() -> str:
    """What ``limen --help`` prints."""
    width = max(map(len, VERBS)) + 2
    verbs = "".join(f"  {name:<{width}}{verb.summary}\n" for name, verb in VERBS.items())
    return (
        "usage: limen VERB [options] [overrides]\n\nReinforcement learning for language models with Ray, vLLM and DeepSpeed.\n\n"
        f"verbs:\n{verbs}\n"
        "overrides: `group=file` picks a YAML file, `key=value` sets a key, `~key` removes one from a map.\n"
        "`limen VERB --help` lists them.\n\n"
        f"{EXAMPLES}\n{EXIT_CODES}"
    )


def describe(name: str) -> str:
    """What ``limen VERB --help`` prints: the verb, its options, the YAML files and the keys of the configuration."""
    verb = VERBS[name]
    if not verb.takes_config:
        return f"usage: limen {f'{name} {verb.argument}'.strip()}\n\n{verb.detail}\n"
    files = "".join(f"  {group}={'|'.join(names)}\n" for group, names in shipped_files().items())
    keys = [(key, item.metadata["help"]) for key, item in schema_keys(Config) if "." not in key]
    width = max(len(key) for key, _ in keys) + 2
    lines = "".join(f"  {key:<{width}}{text}\n" for key, text in keys)
    return (
        f"usage: limen {name} [options] [overrides]\n\n{verb.detail}\n\n{OPTIONS}\nYAML files:\n{files}\n"
        f"keys (`limen {name} --print-config` shows all of them with their values):\n{lines}"
    )


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # where a full disk takes no more of one, the other may be read all the same
        if sys.stdout is not None:
            sys.stdout.flush()
    with contextlib.suppress(OSError):
        print("limen: " + " ".join(text.split()), file=sys.stderr)
