//! The Kubernetes release that a test cluster runs.

use std::sync::OnceLock;

use anyhow::{Result, bail};

/// The releases that tests run on, each with its Go module in `tests/testbed`: the newest (the default) and the oldest
/// supported one.
pub const RELEASES: [&str; 2] = ["v1.37.2", "v1.34.4"];

/// Environment variable that selects the release, for programs without the flag `--kubernetes`.
pub const RELEASE_ENV_VAR: &str = "KRUISE_KUBERNETES";

/// The release that the command line selected.
static CHOSEN: OnceLock<&'static str> = OnceLock::new();

/// Sets the release for this process. A second call changes nothing.
pub fn set_release(release: &'static str) {
    CHOSEN.get_or_init(|| release);
}

/// The release that test clusters of this process run.
///
/// # Errors
/// If the environment names a release that is not in [`RELEASES`].
pub fn release() -> Result<&'static str> {
    if let Some(chosen) = CHOSEN.get() {
        return Ok(chosen);
    }
    match std::env::var(RELEASE_ENV_VAR) {
        Ok(named) if !named.is_empty() => parse_release(&named),
        _ => Ok(RELEASES[0]),
    }
}

/// Parses the name of a release.
///
/// # Errors
/// If it is not in [`RELEASES`].
pub fn parse_release(name: &str) -> Result<&'static str> {
    match RELEASES.into_iter().find(|release| *release == name) {
        Some(release) => Ok(release),
        None => bail!(
            "Kubernetes {name} is not supported by the test bed; choose one of {}",
            RELEASES.join(", ")
        ),
    }
}

/// Whether `release` has the minor version `minor` of Kubernetes 1, or a later one.
#[must_use]
pub fn at_least(release: &str, minor: u32) -> bool {
    let found = release
        .strip_prefix("v1.")
        .and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    found.is_some_and(|found| found >= minor)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn each_release_has_a_go_module_that_pins_it() {
        for release in RELEASES {
            let module = format!("{}/../tests/testbed/{release}/go.mod", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(module).unwrap();
            assert!(text.contains(&format!("k8s.io/kubernetes {release}\n")), "{text}");
        }
    }

    #[test]
    fn parse_release_rejects_unsupported_releases() {
        assert_eq!(parse_release("v1.34.4").unwrap(), "v1.34.4");
        assert!(
            parse_release("v1.20.0")
                .unwrap_err()
                .to_string()
                .contains("v1.37.2, v1.34.4")
        );
        assert!(at_least("v1.37.2", 35) && at_least("v1.35.0", 35) && !at_least("v1.34.4", 35));
        assert!(!at_least("latest", 1));
    }
}
