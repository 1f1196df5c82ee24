"""The printed report: a table of errors, a table of losses, a verdict a mode."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..output import say, table
from .judge import Run, ratio, worst
from .run import Report
from .settings import ENTROPY_LIMIT
from .words import conclusion, number, plant_line, times, verdict


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    if report.references:
        say(console, headline(report))
        yardstick = f"the yardstick is plain eager attention in {report.settings.dtype}"
        say(console, Text(f"\nErrors against the float64 model at equal weights; {yardstick}", "bold"))
        console.print(error_table(report))
        say(console, Text("\nLoss, and how far every mode is from one process", "bold"))
        console.print(loss_table(report))
        console.print()
    for outcome in report.outcomes:
        style = "green" if outcome.within else "yellow" if outcome.run is None else "red"
        say(console, Text.assemble((outcome.mode.name, f"bold {style}"), ": ", verdict(outcome)))
    if report.settings.plant is not None:
        say(console, Text.assemble((f"planted: {report.settings.plant}", "bold yellow"), ". ", plant_line(report)))
    style = "green" if report.exit_code == 0 else "red" if report.exit_code == 1 else "yellow"
    end = f" ({report.seconds:.0f} s, exit {report.exit_code})"
    say(console, Text.assemble("\n", (conclusion(report), f"bold {style}"), end))


def headline(report: Report) -> str:
    """What was trained, in two lines."""
    s, p, c = report.settings, report.problem, report.problem["config"]
    first, second = s.text_lengths
    return (
        f"{p['class']}, {p['parameters'] / 1e6:.1f} M random weights, {c['num_layers']} double and "
        f"{c['num_single_layers']} single blocks, {c['num_attention_heads']} heads of {c['attention_head_dim']}; "
        f"2 samples of {s.image_tokens} image and {s.text_tokens} text tokens ({first} and {second} real)\n"
        f"{s.dtype} on {p['device_name']}, backend {p['backend']}; attention entropy {p['entropy']:.2f} of uniform "
        f"(below {ENTROPY_LIMIT:g}; norms of q and k multiplied by {p['sharpened_by']:.2f})"
    )


def error_table(report: Report) -> Table:
    """One row a run: errors at step 0 against the float64 model, and the worst loss difference."""
    grid = table("\nrun", "forward\nerror", "worst\ngradient", "times the\nyardstick", "loss\noff by", "time\n(s)")
    eager, single = (report.references[name] for name in ("eager", "single"))
    grid.add_row("one process, eager", *_numbers(eager), "yardstick", "", f"{eager.seconds:.1f}", style="dim")
    backend = report.problem["backend"]
    against = ratio(single.errors.gradient, eager.errors.gradient)
    cells = (f"one process, {backend}", *_numbers(single), times(against), "", f"{single.seconds:.1f}")
    grid.add_row(*cells, style="dim")
    for outcome in report.outcomes:
        if outcome.run is None:
            grid.add_row(outcome.mode.name, "not run", style="yellow")
            continue
        loss, run = number(worst(outcome.loss_off)), outcome.run
        cells = (outcome.mode.name, *_numbers(run), times(outcome.ratio), loss, f"{run.seconds:.1f}")
        grid.add_row(*cells, style="" if outcome.within else "red")
    return grid


def loss_table(report: Report) -> Table:
    """One row a step: the loss of one process, what a mode may differ by, and what it does."""
    ran = [outcome for outcome in report.outcomes if outcome.run is not None]
    modes = (outcome.mode.name for outcome in ran)
    grid = table("step", "float64", report.problem["backend"], "allowed", *modes)
    truth, single = (report.references[name].losses[0] for name in ("float64", "single"))
    for step, (exact, alone) in enumerate(zip(truth, single, strict=True)):
        offs = []
        for outcome in ran:
            off, allowed = outcome.loss_off[step], outcome.loss_allowed[step]
            offs.append(Text(number(off), style="" if off <= allowed else "bold red"))
        limit = number(ran[0].loss_allowed[step]) if ran else ""
        grid.add_row(str(step), f"{exact:.6f}", f"{alone:.6f}", limit, *offs)
    return grid


def _numbers(run: Run) -> tuple[str, str]:
    return number(run.errors.forward), number(run.errors.gradient)
