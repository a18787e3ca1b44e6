//! Text of other writers, as it is shown to people.

use std::fmt::Write as _;

/// Makes foreign text safe for a terminal: escapes every invisible character.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_invisible(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Makes a JSON document safe for a terminal: what [`printable`] escapes is escaped as JSON does, so that it stays the
/// same document. Line breaks stay, too: JSON has them only between its parts.
#[must_use]
pub fn printable_json(document: &str) -> String {
    let mut shown = String::with_capacity(document.len());
    for c in document.chars() {
        if c != '\n' && (c.is_control() || is_invisible(c)) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing into a String cannot fail.
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Whether a character is invisible or hides text: what Unicode calls `Default_Ignorable_Code_Point`, separators of
/// lines, annotations, and what changes the direction of the text that follows.
fn is_invisible(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
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
        // With these a name looks like another one, or carries a text that nothing shows.
        assert_eq!(
            printable("we\u{ad}b \u{3164}\u{ffa0}\u{fe0f}\u{e0041}\u{e0100}"),
            "we\\u{ad}b \\u{3164}\\u{ffa0}\\u{fe0f}\\u{e0041}\\u{e0100}"
        );
    }

    #[test]
    fn json_stays_the_same_document() {
        let document = serde_json::json!({ "message": "a\u{1b}\u{9b}\u{7f}\u{202e}\u{e0041}\nü\"\\" });
        let pretty = format!("{document:#}");
        let shown = printable_json(&pretty);
        assert!(
            shown.contains(r"a\u001b\u009b\u007f\u202e\udb40\udc41\nü"),
            "{shown}"
        );
        assert_eq!(shown.lines().count(), pretty.lines().count());
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&shown).ok(),
            Some(document),
            "{shown}"
        );
    }
}
