"""The relay of the drill, for tests."""

from kvstore.drill.reply_proxy import Mangle, ReplyProxy, pass_on

__all__ = ["Mangle", "ReplyProxy", "pass_on"]
