"""Inside a user's program: attention that was advised, called in the place of what it calls."""

from attnbench.dispatch.using import Use as Use

use = Use
