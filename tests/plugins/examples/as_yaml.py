"""YAML: the content of a report."""

import yaml


def show(report, out, err):
    """Write the content as a YAML document; notes and paths of files go to standard error."""
    yaml.safe_dump(report.content, out, sort_keys=False)
    for line in (*report.notes, *report.files):
        print(line, file=err)
