//! Regular expressions of users and administrators.
//!
//! They are matched in linear time. Their syntax is that of RE2 but for details: `[[]` and `a{` must be written as
//! `[\[]` and `a\{`, and `\Q…\E` does not exist.

use regex::{RegexBuilder, RegexSet, RegexSetBuilder};

/// Bytes that a compiled expression may take.
const SIZE_LIMIT: usize = 1 << 20;
/// Bytes that all expressions of a whitelist may take.
const SET_SIZE_LIMIT: usize = 8 << 20;

/// Whether an expression compiles.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    let compiled = RegexBuilder::new(pattern).size_limit(SIZE_LIMIT).build();
    compiled.map(drop).map_err(|error| last_line(&error))
}

/// An expression that matches where one of several does.
pub(super) fn compile_set(patterns: &[String]) -> Result<RegexSet, String> {
    RegexSetBuilder::new(patterns)
        .size_limit(SET_SIZE_LIMIT)
        .build()
        .map_err(|error| last_line(&error))
}

/// The reason, without the drawing above it.
fn last_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let line = text.lines().last().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_compiled_within_limits() {
        for good in ["", ".*", "^w.*", "main|web", "(?i)a", r"^(a|b)\.c{1,3}$"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        assert_eq!(check("["), Err("unclosed character class".to_owned()));
        for bad in [
            "(a",
            "a{2,1}",
            "*",
            r"\",
            "(?<",
            "a{100000}{100000}",
            "(?=a)",
            r"(a)\1",
        ] {
            assert!(check(bad).is_err(), "{bad}");
        }
        let deep = "(".repeat(100_000) + &")".repeat(100_000);
        assert!(check(&deep).is_err() && compile_set(&[deep]).is_err());
    }
}
