"""The command line. Each command imports its modules only when it runs, so that ``asyncflow --help`` is fast.

Invariant: invalid input ends with exit status 2 and one error message, a failure with 1, and an interruption with 130;
a traceback is a bug.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from asyncflow.errors import AsyncFlowError, ManifestError, NotYetError

USAGE = 2
FAILED = 1
INTERRUPTED = 130

_DISK_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space"),
    **dict.fromkeys((errno.EROFS, errno.EIO), "Use another folder"),
}
"""Hint for each error of the disk, by errno."""
_PATH_HINTS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Get access to it, or use another path"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG), "Use another path"),
}
"""Hint for each error of an unusable path, by errno."""

Command = TypeVar("Command", bound=Callable[..., Any])

_NOT_DRAWN = {"why": "it has no effect with --json", "hint": "Leave out --json, or this option"}

_FILE = click.argument("file", type=click.Path(path_type=Path))
_DIRECTORY = click.Path(path_type=Path)


def _overrides(command: Command) -> Command:
    return click.option(
        "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field, e.g. algorithm.steps=5."
    )(command)


def _port(command: Command) -> Command:
    return click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=5571,
        show_default=True,
        help="Port of a standalone queue or publisher; 0 is any free port.",
    )(command)


def _refuse_given(*names: str, why: str, hint: str) -> None:
    """Raise ManifestError if one of these options was given, which have no effect with the other arguments."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
            raise ManifestError(why, where=option.opts[-1], hint=hint)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="asyncflow", message="%(prog)s %(version)s")
def app() -> None:
    """Asynchronous reinforcement learning of language models."""


@app.command()
@_FILE
@click.option("--output", type=_DIRECTORY, help="Folder of the run; runs/NAME by default.")
@_overrides
@click.option("--resume", is_flag=True, help="Continue the run in the folder.")
@click.option("--fresh", is_flag=True, help="Start from scratch; a run in the folder is moved aside to FOLDER.N.")
@_port
def run(file: Path, output: Path | None, overrides: tuple[str, ...], resume: bool, fresh: bool, port: int) -> int:
    """Run a job, or serve a queue or a published model."""
    from asyncflow.api.load import kind_of
    from asyncflow.commands import publish as publishing
    from asyncflow.commands import run as command

    if resume and fresh:
        raise ManifestError("--resume and --fresh exclude each other", hint="Pass one of them")
    alone = {"TransferQueue": command.serve, "WeightSync": publishing.publish}.get(kind_of(file))
    if alone is not None:
        _refuse_given("resume", why="a standalone queue or publisher always continues", hint="Leave it out")
        return alone(file, overrides, output=output, fresh=fresh, port=port)
    _refuse_given("port", why="a job chooses its ports itself", hint="Leave it out: run/processes.json lists them")
    return command.run(file, output=output, overrides=overrides, resume=resume, fresh=fresh)


@app.command()
@_FILE
@_overrides
def validate(file: Path, overrides: tuple[str, ...]) -> None:
    """Check a manifest, without starting anything."""
    from asyncflow.commands import inspect

    inspect.validate(file, overrides)


@app.command()
@_FILE
@_overrides
@click.option("--svg", type=_DIRECTORY, help="Draw the flow of a training sample into this file instead.")
@click.option("--devices", type=click.IntRange(min=2), help="Number of devices to divide for generation and training.")
@click.option("--device", metavar="NAME|FILE", help="Kind of device; by default the usual one of the job's profile.")
@click.option("--what-if", multiple=True, metavar="PATH=VALUE", help="Also plan with this value, and compare.")
@click.option("--schedules", is_flag=True, help="Also plan under every other schedule, and compare.")
@click.option("--probe", type=_DIRECTORY, metavar="DIR|FILE", help="A run, or a file of models, with measured times.")
@click.option("--tokens", type=click.FloatRange(min=1), help="Median number of tokens of a response.")
@click.option("--sigma", type=click.FloatRange(min=0), help="Standard deviation of the log of that number.")
@click.option("--prompt-tokens", type=click.FloatRange(min=1), help="Mean number of tokens of a prompt.")
@click.option("--simulations", type=click.IntRange(min=1), default=12, show_default=True, help="Most simulations.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(file: Path, overrides: tuple[str, ...], svg: Path | None, devices: int | None, **options: Any) -> None:
    """Show the roles of a job, or the best division of --devices."""
    if devices is None:
        from asyncflow.commands import inspect

        _refuse_given(*options, why="it only has an effect with --devices", hint="Pass --devices N, too")
        inspect.plan(file, overrides, svg=svg)
        return
    from asyncflow.commands import planning

    _refuse_given("svg", why="a division of devices is not drawn", hint="Leave out --devices, or this option")
    shown = {name: options.pop(name) for name in ("what_if", "schedules", "as_json")}
    planning.divide(file, overrides, options=planning.PlanOptions(devices=devices, **options), **shown)


class _FileOrCommand(click.Group):
    """A group whose first argument may be a file instead of a command; the command is then ``file``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command ``file`` if the first argument is no command."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["file", *args]
        return super().parse_args(ctx, args)


@app.group(cls=_FileOrCommand)
def sim() -> None:
    """Simulate a job in virtual time: asyncflow sim FILE."""


@sim.command(name="file", hidden=True)
@_FILE
@_overrides
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the response lengths; algorithm.seed by default.")
@click.option("--models", type=_DIRECTORY, help="File with models of all durations, written by asyncflow sim fit.")
@click.option(
    "--colocated",
    type=(click.FloatRange(min=0), click.FloatRange(min=0)),
    metavar="S S",
    help="One set of devices generates, then trains; seconds to switch to training and back.",
)
@click.option("--output", type=_DIRECTORY, help="Folder for timeline.html and timeline.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sim_file(file: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Print the figures of a simulated run of FILE: seconds per step, idle shares, tokens per second, staleness."""
    from asyncflow.commands import sim as command

    if options["as_json"]:
        _refuse_given("output", **_NOT_DRAWN)
    command.sim(file, overrides, **options)


@sim.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--output", type=_DIRECTORY, help="File of the models; DIR/models.json by default.")
def fit(directory: Path, output: Path | None) -> None:
    """Fit models to a recorded run: how long engines, trainer and links take."""
    from asyncflow.commands import sim as command

    command.fit(directory, output=output)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
def audit(directory: Path) -> int:
    """Account for every sample of a run. Exit status 1 if one was lost or trained twice."""
    from asyncflow.commands import inspect

    return inspect.audit(directory)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--step", type=click.IntRange(min=0), help="The step, or with --eval the weights; the newest by default.")
@click.option("--best", "order", flag_value="best", help="Highest rewards first.")
@click.option("--worst", "order", flag_value="worst", help="Lowest rewards first.")
@click.option("-n", "most", type=click.IntRange(min=1), default=8, show_default=True, help="Most samples to show.")
@click.option("--eval", "evaluation", is_flag=True, help="Show samples of an evaluation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def samples(directory: Path, *, evaluation: bool, **options: Any) -> None:
    """Show prompts, responses and rewards of a run."""
    from asyncflow.commands import samples as command

    command.samples(directory, purpose="eval" if evaluation else "train", **options)


@app.command()
@click.argument("target", metavar="DIR|ADDRESS")
@click.option("--once", is_flag=True, help="Show the current state once, and exit.")
def top(target: str, *, once: bool) -> None:
    """Show an active run, until it is over or q is pressed.

    Without a terminal, print lines.

    ADDRESS is HOST:PORT of the driver's HTTP service.
    """
    from asyncflow.commands import top as command

    command.top(target, once=once)


@app.command()
@click.argument("target", metavar="DIR|ADDRESS")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(target: str, *, as_json: bool) -> int:
    """Show the problems of a run and their remedies.

    The run may be active, finished or killed. Exit status 1 if there are problems.

    ADDRESS is HOST:PORT of the driver's HTTP service.
    """
    from asyncflow.commands import doctor as command

    return command.doctor(target, as_json=as_json)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--output", type=_DIRECTORY, help="Folder for timeline.html and timeline.json; DIR by default.")
@click.option("--training", is_flag=True, help="Compute shares from the first prompt on, without the job's startup.")
@click.option("--json", "as_json", is_flag=True, help="Print the shares as JSON, and write no files.")
def timeline(directory: Path, *, output: Path | None, training: bool, as_json: bool) -> None:
    """Show how each process of a run spent its time. Draw a timeline of the run, finished or not."""
    from asyncflow.commands import timeline as command

    if as_json:
        _refuse_given("output", **_NOT_DRAWN)
    command.timeline(directory, output=output, training=training, as_json=as_json)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step.")
@click.option("-n", "most", type=click.IntRange(min=0), default=16, show_default=True, help="Most samples to list.")
@click.option("--again/--list", default=True, help="Compute the step again, or only list its samples.")
@click.option("--output", type=_DIRECTORY, help="Folder for the resulting checkpoint; by default it is not kept.")
def replay(directory: Path, *, step: int, most: int, again: bool, output: Path | None) -> int:
    """Repeat a step of a run and compare the results. Exit status 1 if they differ."""
    from asyncflow.commands import replay as command

    if not again:
        _refuse_given("output", why="--list makes no checkpoint", hint="Leave out --list, or this option")
    return command.replay(directory, step=step, most=most, again=again, output=output)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.argument("sample", metavar="PROMPT/SAMPLE")
def explain(directory: Path, sample: str) -> None:
    """Show the history of one training sample. Example: asyncflow explain runs/NAME 17/3."""
    from asyncflow.commands import explain as command

    command.explain(directory, sample)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page; any free port by default.")
@click.option("--export", "file", type=_DIRECTORY, help="Write the page and the run into this file instead.")
@click.option("--without-texts", is_flag=True, help="Leave texts of samples out of the file.")
def ui(directory: Path, port: int, file: Path | None, without_texts: bool) -> None:
    """Show a run as a page in the browser, until Ctrl-C."""
    from asyncflow.commands import ui as command

    if file is None:
        _refuse_given("without_texts", why="it only has an effect with --export", hint="Pass --export FILE, too")
        command.serve(directory, port=port)
    else:
        _refuse_given("port", why="--export serves nothing", hint="Leave out --export, or this option")
        command.export(directory, file, texts=not without_texts)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--kind", help="The sink; all of them by default.")
@click.option("--job", type=_DIRECTORY, help="The job's manifest; DIR/job.yaml by default.")
@click.option("--follow", is_flag=True, hidden=True, help="Write again at each line of standard input, until it ends.")
def sinks(directory: Path, *, kind: str | None, job: Path | None, follow: bool) -> None:
    """Write the missing figures of a run to its sinks, such as W&B."""
    from asyncflow.process import die_with_parent

    die_with_parent()
    from asyncflow.commands import sinks as command

    command.sinks(directory, kind=kind, job=job, follow=follow)


@app.command()
@click.argument("model")
@click.option("--watch", is_flag=True, help="Also publish each newer model that appears in the folder.")
@click.option("--name", default="weights", show_default=True, help="Name of the WeightSync.")
@_port
@click.option("--output", type=_DIRECTORY, help="Folder for its files; runs/NAME by default.")
@_overrides
@click.option("--fresh", is_flag=True, help="Start from scratch; an existing folder is moved aside to FOLDER.N.")
def publish(
    model: str, watch: bool, name: str, port: int, output: Path | None, overrides: tuple[str, ...], fresh: bool
) -> int:
    """Publish a model for followers, until Ctrl-C. MODEL is a folder, or a source as in a manifest."""
    from asyncflow.commands import publish as command

    settings = [f"metadata.name={name}", f"source.model={model}", *(["source.watch=true"] if watch else [])]
    source = io.StringIO(command.SMALLEST_SYNC)
    return command.publish(source, [*settings, *overrides], output=output, fresh=fresh, port=port)


@app.command()
@click.argument("directory", metavar="RUN", type=_DIRECTORY)
@click.option("--http-port", type=click.IntRange(0, 65535), default=0, help="Port of /metrics; 0 is any free port.")
@click.option(
    "--serve-port", type=click.IntRange(0, 65535), default=0, help="Port of the inference service; 0 is any free port."
)
@click.option("--sync", type=_DIRECTORY, help="A WeightSync that sets how followers of the job update their weights.")
def follow(directory: Path, http_port: int, serve_port: int, sync: Path | None) -> int:
    """Serve the newest weights of a run or publisher. A separate engine loads them, until Ctrl-C."""
    from asyncflow.plugins import importing

    with importing():
        from asyncflow.commands import follow as command

    return command.follow(directory, http_port=http_port, serve_port=serve_port, sync=sync)


@app.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.argument("request", metavar="[ROLE=N]", required=False)
def scale(directory: Path, request: str | None) -> None:
    """Set the number of rollouts of a run. Example: asyncflow scale runs/NAME rollout=4.

    rollout=auto returns the choice to the built-in policy, or to the manifest. Without ROLE=N the number is only shown.
    """
    from asyncflow.commands import scale as command

    command.scale(directory, request)


@app.command(hidden=True)
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if a file is out of date.")
@click.option("--directory", type=_DIRECTORY, default=Path("crds"), show_default=True, help="Folder of the files.")
def crds(check: bool, directory: Path) -> int:
    """Write the CustomResourceDefinitions."""
    from asyncflow.commands import inspect

    return inspect.crds(directory, check=check)


@app.command()
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if the file is out of date.")
@click.option(
    "--file", type=_DIRECTORY, default=Path("docs/reference/reference.md"), show_default=True, help="The file."
)
def reference(check: bool, file: Path) -> int:
    """Write the reference of all fields of a manifest."""
    from asyncflow.commands import reference as command

    if not check:
        command.write(file)
    elif not command.check(file):
        click.echo(f"{file} is out of date\nRun asyncflow reference", err=True)
        return FAILED
    return 0


@app.command(hidden=True)
@click.argument("name")
@click.option("--job", type=_DIRECTORY, required=True, help="The manifest of a job, a TransferQueue or a WeightSync.")
@click.option(
    "--driver", required=True, metavar="ADDRESS", help="Address to which all connect, e.g. tcp://10.0.0.7:5571."
)
@click.option("--index", type=click.IntRange(min=0), default=0, help="Index of the replica or rank.")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Number of the attempt; grows at each restart.")
@click.option("--workdir", type=_DIRECTORY, required=True, help="Folder of the run.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=0, help="Port of /metrics; 0 is any free port.")
@click.option("--control-port", type=click.IntRange(0, 65535), default=0, help="Port of a driver's control service.")
@click.option("--serve-port", type=click.IntRange(0, 65535), default=0, help="Port of a follower's inference service.")
@click.option("--sync", type=_DIRECTORY, help="The WeightSync of a follower of a job.")
@click.option("--http-socket", type=click.IntRange(min=3), hidden=True, help="Descriptor of a bound socket instead.")
@click.option("--insecure", is_flag=True, help="Serve other hosts without a certificate, and without access control.")
@click.option("--local-rank", type=click.IntRange(min=0), hidden=True, help="Index of this rank in its replica.")
def role(name: str, *, insecure: bool, **options: Any) -> int:
    """Run one process of a job, of a standalone queue, or of a publisher. Substrates call this."""
    from asyncflow.process import die_with_parent

    die_with_parent()  # before anything else is imported
    from asyncflow.api.names import INSECURE_ENV, ROLES, TASK, kind_of_role, module_of_role
    from asyncflow.plugins import importing

    if insecure:
        os.environ[INSECURE_ENV] = "1"
    module = module_of_role(name)
    if kind_of_role(name) not in (*ROLES, TASK) or find_spec(module) is None:
        raise NotYetError(f"there is no role {name!r}", where="asyncflow role", hint="See asyncflow plan FILE")
    with importing():
        from asyncflow.roles.context import RoleOptions

        main: Callable[..., int] = import_module(module).main
    return main(RoleOptions(role=name, **options))


@app.command(hidden=True)
@click.option("--reward", type=_DIRECTORY, required=True, help="File with the section spec.reward of a job.")
@click.option("--environment", type=_DIRECTORY, help="File with the section spec.environment, if the job has one.")
@click.option("--socket", type=_DIRECTORY, required=True, help="Path of the Unix socket to listen at.")
def rewards(reward: Path, environment: Path | None, socket: Path) -> None:
    """Score samples for the rollout in the same pod, and answer its turns. The operator's pods call this."""
    from asyncflow.process import die_with_parent

    die_with_parent()  # before anything else is imported
    from asyncflow.environments.service import serve_pools

    serve_pools(reward, environment, path=socket)


@app.group()
def model() -> None:
    """Convert and export model files."""


@model.command(name="import")
@click.argument("package", metavar="PACKAGE_OR_PATH")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
def import_(package: str, directory: Path) -> None:
    """Convert a package's model file into a Hugging Face folder."""
    from asyncflow.commands import inspect

    inspect.import_model(package, directory)


@model.command()
@click.argument("adapters", metavar="EXPORT", type=_DIRECTORY)
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
def merge(adapters: Path, directory: Path) -> None:
    """Merge the exported LoRA adapters of a job into their model, as a Hugging Face folder."""
    from asyncflow.commands import inspect

    inspect.merge_model(adapters, directory)


@model.command()
@click.argument("run", metavar="RUN", type=_DIRECTORY)
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--step", default="newest", show_default=True, help="Step: newest, best, or a number.")
@click.option("--job", type=_DIRECTORY, help="The job's manifest; RUN/job.yaml by default.")
def export(run: Path, directory: Path, step: str, job: Path | None) -> None:
    """Convert a checkpoint of a run into a Hugging Face folder."""
    from asyncflow.commands import inspect

    inspect.export_model(run, directory, step=step, job=job)


@app.group()
def queue() -> None:
    """Serve a standalone queue, or inspect a live one."""


@queue.command()
@click.option(
    "--units", type=click.IntRange(1, 4096), default=1, show_default=True, help="Storage units, one process each."
)
@click.option("--bytes-per-unit", default="256Mi", show_default=True, help="Bytes that one unit may hold.")
@click.option(
    "--backend",
    default="memory",
    show_default=True,
    help="Backend that stores the bytes: memory, mooncake, redis, or one of another package.",
)
@click.option("--name", default="queue", show_default=True, help="The queue's name.")
@_port
@click.option("--output", type=_DIRECTORY, help="Folder of the queue, continued if it exists; runs/NAME by default.")
@_overrides
@click.option("--fresh", is_flag=True, help="Start from scratch; a queue in the folder is moved aside to FOLDER.N.")
def serve(
    units: int,
    bytes_per_unit: str,
    backend: str,
    name: str,
    port: int,
    output: Path | None,
    overrides: tuple[str, ...],
    fresh: bool,
) -> int:
    """Serve a queue on this machine until Ctrl-C."""
    from asyncflow.commands import run as command

    fields = {"metadata.name": name, "storageUnits": units, "bytesPerUnit": bytes_per_unit, "backend": backend}
    settings = [*(f"{path}={value}" for path, value in fields.items()), *overrides]
    return command.serve(io.StringIO(command.SMALLEST_QUEUE), settings, output=output, fresh=fresh, port=port)


def _inspection(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--timeout", type=click.FloatRange(0, min_open=True), default=10.0, help="Seconds to wait; 10 by default."
        ),
        click.option("--tls", type=_DIRECTORY, envvar="ASYNCFLOW_TLS", help="Folder with your certificate."),
        click.argument("address"),
    ):
        command = option(command)
    return command


@queue.command()
@_inspection
def ls(**options: Any) -> None:
    """List the partitions of a queue. ADDRESS is its address, such as tcp://127.0.0.1:5571."""
    from asyncflow.commands import queue as command

    command.ls(**options)


@queue.command()
@_inspection
@click.argument("unit", type=click.IntRange(min=0))
def drain(**options: Any) -> None:
    """Move the rows of a storage unit to the others. Wait up to --timeout seconds until it has left."""
    from asyncflow.commands import queue as command

    command.drain(**options)


@queue.command()
@_inspection
@click.argument("partition")
def show(**options: Any) -> None:
    """Show the progress of each task, and what it waits for."""
    from asyncflow.commands import queue as command

    command.show(**options)


@queue.command()
@_inspection
@click.argument("partition")
@click.option("--task", default="", help="Show the rows as this task sees them.")
@click.option("--rows", "most", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Most rows.")
@click.option("--column", "columns", multiple=True, help="Show the values of this column; may be repeated.")
def peek(**options: Any) -> None:
    """Show the oldest rows of a partition, without leasing them."""
    from asyncflow.commands import queue as command

    command.peek(**options)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; print an error as one message to stderr."""
    try:
        result = app.main(args=list(arguments), prog_name="asyncflow", standalone_mode=False)
    except click.ClickException as error:
        return _refuse(error.format_message(), error.exit_code)
    except AsyncFlowError as error:
        return _refuse(str(error), USAGE if isinstance(error, ManifestError) else FAILED)
    except OSError as error:
        number, path = error.errno or 0, error.filename
        if number == errno.ENOENT and path is None and not os.stat(".").st_nlink:
            path = "the working directory"
        if (hint := _DISK_HINTS.get(number)) is not None:
            return _refuse(f"{path or 'a file'} cannot be written: {error.strerror}. {hint}", FAILED)
        if path is None or (hint := _PATH_HINTS.get(number)) is None:
            raise
        return _refuse(f"{path}: {error.strerror}. {hint}", USAGE)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the command line of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for θ, if the encoding lacks it
    sys.exit(invoke(sys.argv[1:]))


def _refuse(message: str, status: int) -> int:
    click.echo(f"error: {message}", err=True)
    return status
