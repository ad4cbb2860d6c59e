"""Lookup transports and hash codecs that ship with kvpool; each is imported only when it is used."""
