"""report.html: what an analysis found, as one file that opens from disk without a network.

`data` makes one JSON object of a study, each `data_*` module a part of it; `encode` packs it; `build` puts it,
plotly.js and the page's own style and code into the template. The page (`page.html.j2`, `style.css`, `app/`) draws it.
"""
