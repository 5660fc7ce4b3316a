"""The kinds of answers, a module each; :func:`answer_kinds` finds them by their being here."""
