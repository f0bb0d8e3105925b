"""Functions in the place of others: mistakes that are planted, and what looks on."""

from functools import wraps

import pytest


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


def watched(patch, owner, name):
    """The arguments of every call of `owner.name` from here on."""
    calls = []
    replaced(patch, owner, name)(lambda right, *given, **named: calls.append(given) or right(*given, **named))
    return calls


def interrupt(owner, name, call, *arguments, when=lambda *_: True):
    """A call that Ctrl-C ends where it gets to `owner.name`, the first time that `when` holds of what that is given."""

    def pressed(right, *given, **named):
        if when(*given):
            raise KeyboardInterrupt
        return right(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        replaced(patch, owner, name)(pressed)
        with pytest.raises(KeyboardInterrupt):
            call(*arguments)
