"""Functions in the place of others: mistakes that are planted, and what looks on."""

from functools import wraps


def instead_of(owner, name):
    """Of a function (right, *arguments) that is to be called where `owner.name` was: what puts it there, by a patch."""

    def decorate(wrong):
        @wraps(wrong)
        def plant(patch):
            right = getattr(owner, name)
            if isinstance(right, property):
                patch.setattr(owner, name, property(lambda self: wrong(right.fget, self)))
            else:
                patch.setattr(owner, name, lambda *given, **named: wrong(right, *given, **named))

        return plant

    return decorate


def replaced(patch, owner, name):
    """Of such a function: it is put there at once."""

    def decorate(wrong):
        instead_of(owner, name)(wrong)(patch)
        return wrong

    return decorate
