"""Sphinx settings of the site; `build.py` beside this file makes the pages and runs Sphinx."""

project = "rl-plugins"
author = "the authors of rl-plugins"
html_title = "rl-plugins"
html_show_copyright = False

extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
root_doc = "index"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "tango", "github-dark"
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # blocks that are nearly Python
