"""`headrace launch CONFIG --engine ... --slice ...`: a run on rented machines.

Writes what the engine takes and says how to start it; starts it only with --run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def launch(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    engine: Annotated[str, typer.Option(help="skypilot, gke or gcloud.")],
    slice_name: Annotated[str, typer.Option("--slice", help="v5p-8, v6e-16, h100-8 ...")],
    name: Annotated[str, typer.Option(help="Name of the job.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("launch"),
    run: Annotated[bool, typer.Option("--run", help="Start it; this rents machines.")] = False,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that may be taken away.")] = False,
    zone: Annotated[str | None, typer.Option(help="Zone; gcloud needs one.")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="Cloud Storage bucket for output_dir, which all hosts see.")
    ] = None,
    install: Annotated[
        list[str] | None, typer.Option(help="pip requirement; default headrace[tpu] or [cuda].")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image with headrace (gke).")] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue (gke).")] = None,
    secret: Annotated[
        str | None, typer.Option(help="Kubernetes secret with the key HF_TOKEN (gke).")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often a lost machine is replaced.")
    ] = 10,
) -> None:
    """Write what SkyPilot, GKE or gcloud needs for a run; --run starts it. Flags as in train."""
    from headrace.config import load_config
    from headrace.launch import LaunchRequest, write_launch
    from headrace.plan.hardware import parse_slice

    # A recipe that cannot run is refused before money is spent.
    config = load_config(recipe, context.args).config
    wanted = parse_slice(slice_name)
    alone = wanted.num_devices == 1 or config.mesh is not None
    extra = "tpu" if wanted.is_tpu else "cuda"
    request = LaunchRequest(
        engine=engine,
        name=name or f"headrace-{recipe.stem.lower().replace('_', '-')}"[:40].rstrip("-"),
        recipe=recipe.read_text(encoding="utf-8"),
        recipe_name=recipe.name,
        slice=wanted,
        spot=spot,
        zone=zone,
        bucket=bucket,
        install=tuple(install or [f"headrace[{extra}]"]),
        image=image,
        queue=queue,
        secret=secret,
        restarts=restarts,
        flags=(*context.args, *(() if alone else ("--mesh", "auto"))),
    )
    written, command = write_launch(request, out)
    for path in written:
        typer.echo(f"wrote {path}")
    for setting in ("model_name_or_path", "dataset_name", "eval_dataset_name"):
        value = getattr(config, setting)
        if value is not None and Path(str(value)).exists():
            typer.echo(
                f"note: {setting} {value} is a path of this machine; it must exist there too"
            )
    _start(command, out, run)


def _start(command: list[str], folder: Path, run: bool) -> None:
    import shlex
    import shutil
    import subprocess

    from headrace.errors import ConfigError

    if not run:
        words = f"cd {shlex.quote(str(folder))} && {shlex.join(command)}"
        typer.echo(f"to start it (this rents machines): {words}")
        return
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; the files are written")
    done = subprocess.run(command, cwd=folder, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
