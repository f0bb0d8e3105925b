"""EAGLE 3.1 drafters: hidden-state extraction, the recurrence and its loss, evaluation, export."""

import os

PARENT = os.getppid()  # as this process began; another one later tells that who launched it has ended
