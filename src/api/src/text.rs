//! Text of other writers, as it is shown to people.

/// Makes foreign text safe for a terminal: escapes every invisible character.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        // Characters without width, separators of lines, and those that change the direction of the text that follows
        // can hide text, too.
        let hides_text = matches!(c, '\u{61c}' | '\u{feff}')
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}');
        if c.is_control() || hides_text {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_escaped() {
        assert_eq!(printable("naïve 世界"), "naïve 世界");
        assert_eq!(printable("a\u{1b}[2Jb\r\n\t"), "a\\u{1b}[2Jb\\r\\n\\t");
        assert_eq!(printable("\u{9b}31m\u{7f}"), "\\u{9b}31m\\u{7f}");
        assert_eq!(printable("\u{202e}gpj"), "\\u{202e}gpj");
        assert_eq!(
            printable("a\u{61c}\u{2028}\u{2029}"),
            "a\\u{61c}\\u{2028}\\u{2029}"
        );
        assert_eq!(
            printable("a\u{200b}b\u{200d}\u{2060}\u{feff}"),
            "a\\u{200b}b\\u{200d}\\u{2060}\\u{feff}"
        );
    }
}
