"""A process that carries out ranks, for `roles.run_roles`."""

from pangu.dryrun.roles import serve

serve()
