//! Each series of containerd that tests run against. It starts real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use testbed::cluster::{CONTAINERD_VERSIONS, Runtime};

#[test]
fn every_containerd_series_starts() {
    for (suite, series) in CONTAINERD_VERSIONS {
        let runtime = Runtime::start(suite).unwrap();
        let version = runtime.ctr(&["version"]).unwrap();
        assert!(
            version.contains(&format!("  Version:  {series}")),
            "{suite}: {version}"
        );
        let plugins = runtime.ctr(&["plugins", "list"]).unwrap();
        let cri = plugins
            .lines()
            .filter(|l| l.contains(".cri") || l.split_whitespace().nth(1) == Some("cri"));
        let cri: Vec<&str> = cri.collect();
        assert!(
            !cri.is_empty() && cri.iter().all(|l| l.trim().ends_with("ok")),
            "{suite}: {plugins}"
        );
    }
}
