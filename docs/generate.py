"""Pages and pictures of the site that are made from the code; `conf.py` calls these."""

import inspect
from pathlib import Path

import click
import typer
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

# Documented elsewhere: the ledger and the plan at the root, requests by scikit-learn.
EXCLUDED = "Ledger, Plan, set_fit_request, set_score_request, set_transform_request"
# The modules whose public names get a page each.
MODULES = (
    "matrixdp.queries",
    "matrixdp.tables",
    "matrixdp.mechanisms",
    "matrixdp.distributions",
    "matrixdp.distributions.covariance",
    "matrixdp.privacy.gaussian",
    "matrixdp.planning",
    "matrixdp.accounting.ledger",
    "matrixdp.audit",
    "matrixdp.postprocess",
    "matrixdp.sklearn",
    "matrixdp.learn",
    "matrixdp.federated",
    "matrixdp.streams",
    "matrixdp.distributed",
    "matrixdp.plots",
)


class FigureScraper:
    """Saves each matplotlib Figure that a block of an example left in a variable; pyplot is not used here."""

    def __repr__(self):  # part of the configuration, so the same in every build
        return "FigureScraper()"

    def __call__(self, block, block_vars, gallery_conf):
        """The reStructuredText of the pictures, as sphinx-gallery asks for it."""
        saved = []
        for name, found in list(block_vars["example_globals"].items()):
            if isinstance(found, Figure) and not hasattr(found, "in_gallery"):
                found.in_gallery = name
                path = next(block_vars["image_path_iterator"])
                found.savefig(path, dpi=120)
                saved.append(path)
        return figure_rst(saved, gallery_conf["src_dir"])


def write(folder: Path) -> None:
    """Writes every generated page into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command-line.md").write_text(command_line(), encoding="utf-8")
    for module in MODULES:
        text = f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n   :exclude-members: {EXCLUDED}\n"
        (folder / f"{module}.rst").write_text(text, encoding="utf-8")


def command_line() -> str:
    """The help of every command, as a page."""
    from matrixdp.cli import app

    root = typer.main.get_command(app)
    parts = ["# The command line\n\nMade from the commands' own help; `matrixdp COMMAND --help` shows the same.\n"]
    parts += _commands(root, click.Context(root, info_name="matrixdp"), 2)
    return "\n".join(parts)


def _commands(group: click.Group, context: click.Context, level: int) -> list[str]:
    parts = []
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        inner = click.Context(command, info_name=name, parent=context)
        help_text = inspect.cleandoc(command.help or "").replace("\f", "")
        parts.append(f"{'#' * level} `{inner.command_path}`\n\n{help_text}\n")
        if isinstance(command, click.Group):
            parts += _commands(command, inner, level + 1)
            continue
        pieces = " ".join(command.collect_usage_pieces(inner))
        parts.append(f"```text\n{inner.command_path} {pieces}\n```\n")
        rows = [record for option in command.get_params(inner) if (record := _help_record(option, inner))]
        if rows:
            parts.append("| option | what it is |\n|---|---|")
            parts += [f"| `{_cell(what)}` | {_cell(words)} |" for what, words in rows]
            parts.append("")
    return parts


def _help_record(option: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    if isinstance(option, click.Argument):
        return option.human_readable_name.upper(), getattr(option, "help", "") or ""
    return option.get_help_record(context)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
