"""Fonts for plots: letters that Matplotlib's own font lacks come from other installed fonts, or are noted as missing."""

missing: set[str] = set()  # letters in plots so far that no installed font has


def provide(figure) -> None:
    """Let the texts of a Matplotlib figure fall back to installed fonts for letters that its own lacks."""
    from matplotlib import font_manager, ft2font

    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # these calls create the labels
    texts = figure.findobj(lambda artist: hasattr(artist, "get_fontfamily"))
    rest = {letter for text in texts for letter in text.get_text() if letter.isprintable()} - missing
    manager, own = font_manager.fontManager, font_manager.findfont(font_manager.FontProperties())
    fonts = sorted(font_manager.findSystemFonts(), key=lambda path: ("cjk" not in path.lower(), path))
    for path in [own, *fonts] if rest else []:
        try:
            font = ft2font.FT2Font(path)
            found = {letter for letter in rest if font.scalable and font.get_char_index(ord(letter))}
            if found and font.family_name not in manager.get_font_names():
                manager.addfont(path)  # Matplotlib's list is kept on disk and lacks new fonts
        except (OSError, RuntimeError):  # no font
            continue
        for text in texts if found and path != own else ():
            text.set_fontfamily([*text.get_fontfamily(), font.family_name])
        if not (rest := rest - found):
            break
    missing.update(rest)
