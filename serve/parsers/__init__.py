"""What a model writes beside plain text: its reasoning and its tool calls, one file a family of formats.

A parser is fed an output's text in whatever pieces it arrives and says what each piece is. It reads through a `Source`,
whose answers depend on the text alone and never on where it was cut, so a streamed answer equals the whole one.
"""
