"""`jaxspec chat`: a conversation in a terminal, in which accepted drafts have a colour."""
