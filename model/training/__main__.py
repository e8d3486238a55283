"""``python -m model.training``: the training program."""

from model.training.program import main

if __name__ == "__main__":
    main()
