"""``python -m vlshard``."""

from vlshard.cli import main

raise SystemExit(main())
