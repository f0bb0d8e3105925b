"""EAGLE 3.1 drafters: hidden-state extraction, the recurrence and its loss, evaluation, export."""
