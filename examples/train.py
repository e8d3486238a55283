"""Train a Qwen3-VL-MoE from files, under a plan: ``python -m model.training`` as a file.

``torchrun --nproc-per-node 2 examples/train.py --plan plans/vision_cp_ulysses.py --model DIR
--data FILE.jsonl --steps 100 --batch 8 --save OUT``. What it is made of can be imported from
``model.training``.
"""

from model.training.program import main

if __name__ == "__main__":
    main()
