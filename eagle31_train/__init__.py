"""EAGLE 3.1 drafters: hidden-state extraction, the recurrence and its loss, evaluation, export."""

import os

PARENT = os.getppid()  # at start; a different parent later means that the launcher has ended
