"""The pages of the site: each module here has a function ``pages(gathered)`` (:mod:`tools.report.page`)."""
