"""Self-contained HTML pages: Jinja templates with Plotly plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sglang_parse.client.sections import Plot, Sections

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's, for colour-blind readers.
PALETTE = {
    "grey": "#5f6368",
    "orange": "#e69f00",
    "green": "#009e73",
    "sky": "#56b4e9",
    "teal": "#2a7f7f",
    "blue": "#0072b2",
    "red": "#d55e00",
    "brown": "#7f4f24",
    "light grey": "#9aa0a6",
    "purple": "#cc79a7",
    "yellow": "#b8a000",
    "navy": "#1f3a5f",
    "olive": "#6b8e23",
    "maroon": "#7b1e3a",
    "violet": "#5b3a8c",
}
_HERE = "sglang_parse.client"


def render_report(title: str, sections: Sections) -> str:
    """A page of sections; the first one's heading is "" where the title is heading enough."""
    parts = [part for parts in sections.values() for part in parts]
    plots = {part.name: _div(part) for part in parts if isinstance(part, Plot)}
    script = ""
    if plots:  # a page without plots needs no Plotly, which comes with an extra
        from plotly.offline import get_plotlyjs

        script = get_plotlyjs()
    plotly = Markup(script)  # noqa: S704 - the library's own
    values = {"title": title, "sections": sections, "plots": plots, "plotly": plotly}
    return render(_HERE, "report.html.j2", **values)


def render(package: str, template: str, **values: Any) -> str:
    """Renders a template of a package's folder ``templates``; this one's has the shared style."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, _HERE)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Globals, so that the template's macros see them too.
    environment.globals |= values
    return environment.get_template(template).render()


def error_bars(points: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Plotly's error bars, from (low, middle, high)."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for _, middle, high in points],
        "arrayminus": [middle - low for low, middle, _ in points],
        "thickness": 1,
        "width": 3,
    }


def _div(part: Plot) -> Markup:
    plot = part.figure
    plot.update_layout(
        template="plotly_white",
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13},
        showlegend=False,  # in HTML below: Plotly's own covers the plot where it is narrow
        hoverlabel={"namelength": -1},
    )
    html = plot.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displaylogo": False, "displayModeBar": False},
        div_id=f"plot-{part.name}",
        default_height=plot.layout.height or 420,
    )
    return _legend(plot) + Markup(html)  # noqa: S704 - made by the library from our numbers


def _legend(plot: go.Figure) -> Markup:
    """Names and colours of the traces."""
    entries = [
        Markup('<span><i style="background: {}"></i>{}</span>').format(
            trace.marker.color, trace.name
        )
        for trace in plot.data
    ]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(entries))
