"""The report as one HTML page that needs nothing else: no network, no fonts, no files beside it."""

import base64
import hashlib
from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from iterand.experiments.report import formatting, layout, settings
from iterand.experiments.report.assembly import Report
from iterand.experiments.report.figures import draw
from iterand.experiments.report.machines import Machines
from iterand.experiments.report.measures import measure
from iterand.experiments.report.statistics import LIMIT
from iterand.experiments.report.svg import Styles

_PACKAGE = "iterand.experiments.report"
_FOLDER = "template"


def as_html(report: Report) -> str:
    """The page. The same records give the same bytes."""
    styles = Styles()
    script = _text("page.js")
    environment = Environment(
        loader=PackageLoader(_PACKAGE, _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        report=report,
        machines=Machines(report.runs),
        drawings={outcome.experiment.name: draw(outcome, styles) for outcome in report.started},
        style=_text("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        limit=LIMIT,
        format=formatting,
        layout=layout,
        settings=settings,
        measure=measure,
        version=version("iterand"),
    )


def _text(name: str) -> str:
    return (files(_PACKAGE) / _FOLDER / name).read_text(encoding="utf-8")
