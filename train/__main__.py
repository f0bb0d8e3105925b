"""`python -m train`: stage 3 as train.py runs it, where there is no train.py: in an installed wheel."""

from train.loop import main

if __name__ == "__main__":
    main()
