"""The pages of the site: each module has a function ``pages(gathered)``, see :mod:`tools.report.page`."""
