"""`python -m umm_reflect VERB ...`: the same as the console command `umm-reflect`."""

from umm_reflect.cli import entry

entry()
