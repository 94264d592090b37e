"""Self-contained HTML pages: Jinja templates with Plotly plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's, for colour-blind readers.
PALETTE = {
    "blue": "#0072b2",
    "red": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "yellow": "#b8a000",
    "brown": "#7f4f24",
    "teal": "#2a7f7f",
    "grey": "#5f6368",
    "light grey": "#9aa0a6",
}
_HERE = "sglang_parse.client"
_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def render(package: str, template: str, plots: Mapping[str, go.Figure], **values: Any) -> str:
    """Renders a page.

    Args:
        package: its folder ``templates`` holds the template; this one has the shared style.
        plots: in the template ``plots.<name>``.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, _HERE)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Globals, so that the template's macros see them too.
    environment.globals |= values
    script = ""
    if plots:  # a page without plots needs no Plotly, which comes with an extra
        from plotly.offline import get_plotlyjs

        script = get_plotlyjs()
    return environment.get_template(template).render(
        plots={name: _div(name, plot) for name, plot in plots.items()},
        plotly=Markup(script),  # noqa: S704 - the library's own
    )


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


def _div(name: str, plot: go.Figure) -> Markup:
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
        config=_CONFIG,
        div_id=f"plot-{name}",
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
