//! Values of flags, parsed as in OpenKruise's programs: an empty value means the default, durations are written as in
//! Go.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

/// Reads a path, which may be empty; see [`non_empty_path`].
///
/// # Errors
/// Never.
pub fn path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text))
}

/// The path, unless it is empty.
#[must_use]
pub fn non_empty_path(path: Option<&PathBuf>) -> Option<PathBuf> {
    path.filter(|path| !path.as_os_str().is_empty()).cloned()
}

/// Reads text; an empty one means `default`.
pub fn or(default: &'static str) -> impl Fn(&str) -> Result<String, Infallible> + Clone + Send + Sync {
    move |text| Ok(if text.is_empty() { default } else { text }.to_owned())
}

/// Reads a number of workers, at least 1.
///
/// # Errors
/// When it is not a number.
pub fn workers(text: &str) -> Result<usize, String> {
    let number: i32 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    Ok(usize::try_from(number).unwrap_or(1).max(1))
}

/// Reads a duration as Go writes it.
///
/// # Errors
/// When it is not a duration, or is negative.
pub fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration; expected for example 30s, 500ms or 1m30s");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let span: jiff::SignedDuration = text.parse().map_err(|_| invalid())?;
    Duration::try_from(span).map_err(|_| invalid())
}

/// The values of an empty command line.
#[cfg(any(test, feature = "testing"))]
#[must_use]
pub fn default_args<A: clap::Args>() -> A {
    let command = A::augment_args(clap::Command::new("test"));
    let given = command.get_matches_from(["test"]);
    A::from_arg_matches(&given).unwrap_or_else(|error| error.exit())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn durations_are_parsed_in_go_syntax() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        assert!(duration("-1s").is_err());
        assert!(duration("soon").is_err());
    }

    #[test]
    fn empty_values_mean_the_default() {
        assert_eq!(non_empty_path(Some(&path("").unwrap())), None);
        assert_eq!(or("a")(""), Ok("a".to_owned()));
        assert_eq!(or("a")("b"), Ok("b".to_owned()));
        assert_eq!([workers("-1"), workers("0"), workers("3")], [Ok(1), Ok(1), Ok(3)]);
    }
}
