"""YAML: the content of a output."""

import yaml


def show(output, out, err):
    """Write the content as a YAML document; notes and paths of files go to standard error."""
    yaml.safe_dump(output.content, out, sort_keys=False)
    for line in (*output.notes, *output.files):
        print(line, file=err)
