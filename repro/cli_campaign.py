"""The verbs about many trials: verify, hunt, minimise, bisect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Common, PlanFlags, flags

__all__ = ["register"]

_FLAG_ROW = "With --on server: a row with these engine flags instead of --enforce-eager. May be repeated."

_KERNEL = "A further kernel, two rows: builtin:VARIANT, vllm==0.27.1, installed, a .whl, .so or .cubin. May be repeated."


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    _verify(app)
    _hunt(app)
    _minimise(app)
    _bisect(app)


def _verify(app: typer.Typer) -> None:
    @app.command(short_help="Prove a fix: neither, producer only, consumer only, both; with stated error rates.")
    @flags(Common, PlanFlags)
    def verify(
        common: Common,
        plan: PlanFlags,
        scenario: Annotated[str, typer.Argument(help="The scenario, e.g. drain.", metavar="SCENARIO")],
        on: Annotated[str | None, typer.Option("--on", help="Ground: gpu, cpu or server.")] = None,
        unfixed: Annotated[str, typer.Option("--unfixed", help="The kernel of rows without the consumer fix.")] = "builtin",
        fixed: Annotated[str, typer.Option("--fixed", help="The kernel of rows with the consumer fix.")] = "builtin:guard",
        kernel: Annotated[list[str] | None, typer.Option("--kernel", help=_KERNEL)] = None,
        arch: Annotated[str | None, typer.Option("--arch", help="With --on cpu: architecture, e.g. sm_120.")] = None,
        device: Annotated[str | None, typer.Option("--device", help="GPU number; with --on cpu the GPU to stand for.")] = None,
        schedule: Annotated[
            str, typer.Option("--schedule", help="With --on cpu: smallest-pc, random or priority.")
        ] = "smallest-pc",
        alpha: Annotated[float, typer.Option("--alpha", help="Chance that a healthy row is called HANGS, per row.")] = 0.01,
        beta: Annotated[float, typer.Option("--beta", help="Chance that a row with --hazard or more is called CLEAN.")] = 0.01,
        hazard: Annotated[float, typer.Option("--hazard", help="Smallest hang hazard per window worth finding.")] = 0.1,
        trials: Annotated[int, typer.Option("--trials", help="Trials of a row at most.", min=1, max=1_000_000)] = 400,
        min_trials: Annotated[
            int | None,
            typer.Option("--min-trials", help="Trials of a row at least; 20, on a server 1.", min=1, max=1_000_000),
        ] = None,
        ablate: Annotated[bool, typer.Option("--ablate", help="Turn each condition off in turn instead.")] = False,
        share: Annotated[bool, typer.Option("--share", help="Use a GPU that holds somebody's process.")] = False,
        model: Annotated[str | None, typer.Option("--model", help="With --on server: a model, or dummy.")] = None,
        python: Annotated[str | None, typer.Option("--python", help="With --on server: the interpreter that has vLLM.")] = None,
        tp: Annotated[int | None, typer.Option("--tp", help="With --on server: tensor-parallel size.", min=1)] = None,
        flag_row: Annotated[list[str] | None, typer.Option("--flag-row", help=_FLAG_ROW)] = None,
        row: Annotated[
            list[str] | None, typer.Option("--row", help="With --on server: only this row, beside neither. May be repeated.")
        ] = None,
        engine: Annotated[
            list[str] | None,
            typer.Argument(metavar="-- ENGINE FLAGS", help="After --: flags of vllm serve, of all rows.", show_default=False),
        ] = None,
    ) -> int:
        """Which fix ends the hang, and is each enough alone? A row per combination, as many trials as the test needs.

        A row in which no trial reached the danger window is INCONCLUSIVE. With --out DIR: verify.md and verify.json.

        On a server the rows are: neither, producer only (--guard), no MTP, other engine flags (--enforce-eager).

        Exit status: 0 it hangs without a fix and not with both, 3 a repaired row (or one of --kernel) hangs, 5 open.
        """
        from .campaign.verify_run import VerifyFlags, run_verify

        least = min_trials if min_trials is not None else 1 if on == "server" else 20
        asked = VerifyFlags(
            on, unfixed, fixed, tuple(kernel or ()), arch, device, schedule, alpha, beta, hazard, trials, least, ablate, share,
            model, python, tp, tuple(engine or ()), tuple(flag_row or ()), tuple(row or ()),
        )  # fmt: skip
        return run_verify(scenario, common, plan, asked)


def _minimise(app: typer.Typer) -> None:
    @app.command(short_help="Shrink a hang to the smallest launch, and write a standalone reproducer.")
    @flags(Common)
    def minimise(
        common: Common,
        run: Annotated[Path, typer.Argument(help="A run directory of run drain that found a hang.", metavar="RUN")],
        on: Annotated[str | None, typer.Option("--on", help="gpu or cpu; the run's own ground by default.")] = None,
        confirm: Annotated[
            int, typer.Option("--confirm", help="Repetitions that must all hang for a candidate to be kept.", min=1, max=10_000)
        ] = 5,
    ) -> int:
        """Delta debugging over the drain plan, the rows, the lengths and the launch, until nothing can go.

        Writes minimised.json and reproducer.py, one file that exits 3 when it hangs and releases itself.

        Exit status: 3 the hang was seen again and shrunk, 5 it was not seen again.
        """
        from .campaign.minimise import run_minimise

        return run_minimise(run, common, on=on, confirm=confirm)


_GIT = "One step for git bisect run: judge --kernel; exit 0 good, 1 bad, 125 skip, 128 stop."


def _bisect(app: typer.Typer) -> None:
    @app.command(short_help="Find the release, wheel or commit where a hang begins or ends.")
    @flags(Common)
    def bisect(
        common: Common,
        good: Annotated[str | None, typer.Option("--good", help="A build that is good: a release, or a name in --builds.")] = None,
        bad: Annotated[
            str | None, typer.Option("--bad", help="A build that is bad; it may be older or newer than the good.")
        ] = None,
        builds: Annotated[Path | None, typer.Option("--builds", help="A directory of wheels, .so or .cubin files.")] = None,
        index: Annotated[str | None, typer.Option("--index", help="A package index of nightly wheels.")] = None,
        predicate: Annotated[
            str, typer.Option("--predicate", help="What bad means: hang (same identity), audit (recipe wedges), present (kernel).")
        ] = "hang",
        identity: Annotated[str | None, typer.Option("--identity", help="The hang's identity; else that of the bad end.")] = None,
        on: Annotated[str, typer.Option("--on", help="Ground of the predicate hang: gpu or cpu.")] = "cpu",
        arch: Annotated[str | None, typer.Option("--arch", help="Architecture, e.g. sm_120.")] = None,
        recipe: Annotated[str | None, typer.Option("--recipe", help="With --predicate audit: as of the verb audit.")] = None,
        trials: Annotated[int, typer.Option("--trials", help="Clean trials that make a build good.", min=1, max=100_000)] = 3,
        share: Annotated[bool, typer.Option("--share", help="Use a GPU that holds somebody's process.")] = False,
        git_run: Annotated[bool, typer.Option("--git-run", help=_GIT)] = False,
        kernel: Annotated[str | None, typer.Option("--kernel", help="With --git-run: what this commit built.")] = None,
    ) -> int:
        """Which build is the first that hangs, or the first that does not? Bad is the same hang identity, not any failure.

        With --out DIR each step's evidence is kept. A build that cannot run is skipped.

        Exit status: 0 found, 5 not found, or only a range.
        """
        from .campaign.bisect_run import BisectFlags, run_bisect, run_git_step

        asked = BisectFlags(good, bad, builds, index, predicate, identity, on, arch, recipe, trials, share, kernel)
        return run_git_step(common, asked) if git_run else run_bisect(common, asked)


def _hunt(app: typer.Typer) -> None:
    @app.command(short_help="A campaign over a matrix of workloads: hangs found, told apart, shrunk, bundled.")
    @flags(Common)
    def hunt(
        common: Common,
        plan: Annotated[Path | None, typer.Argument(help="The plan, a TOML or JSON file.", metavar="PLAN.toml")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the campaign in --out, if there is one.")] = False,
        status: Annotated[Path | None, typer.Option("--status", help="Only look at the campaign in this folder.")] = None,
        workers: Annotated[
            int | None, typer.Option("--workers", help="Processes; CPU cores or GPUs by default.", min=1, max=1024)
        ] = None,
        gpus: Annotated[str | None, typer.Option("--gpus", help="Numbers of the GPUs to use, e.g. 0,1.")] = None,
        ray: Annotated[str | None, typer.Option("--ray", help="Run as Ray tasks: local, or a cluster's address.")] = None,
        compare: Annotated[Path | None, typer.Option("--compare", help="An earlier campaign's folder: new, gone, changed.")] = None,
        fail_on: Annotated[str, typer.Option("--fail-on", help="any hang, or only new ones (with --compare).")] = "any",
        junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file too.")] = None,
    ) -> int:
        """Run the plan's matrix until its budget is used up. Every trial is stored as it ends: kill -9 loses those in flight.

        In --out (default campaigns/NAME): campaign.sqlite, campaign.html, junit.xml, summary.md, hangs/IDENTITY/. In a GitHub
        Action the summary is added to the job's.

        Exit status: 3 a hang, 4 another failure, 5 no danger window reached, 0 clean.
        """
        from .campaign.hunt_run import HuntFlags, run_hunt

        return run_hunt(common, HuntFlags(plan, resume, status, workers, gpus, ray, compare, fail_on, junit))
