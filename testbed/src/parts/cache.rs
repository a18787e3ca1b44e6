//! Where the test bed keeps what it downloaded and built.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::kubernetes;

/// Version of kwok, which plays nodes by the thousand.
pub const KWOK: &str = "v0.8.0";

/// The cache folder: `KRUISE_TESTBED_CACHE`, else `kruise-rs` in `XDG_CACHE_HOME`, else in `~/.cache`.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
    release: &'static str,
}

impl Cache {
    /// Opens the folder and makes it where it is missing.
    pub fn open() -> Result<Self> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let root = variable("KRUISE_TESTBED_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("kruise-rs")))
            .or_else(|| variable("HOME").map(|d| d.join(".cache/kruise-rs")))
            .context("no cache folder: set KRUISE_TESTBED_CACHE, XDG_CACHE_HOME or HOME")?;
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        Ok(Self {
            root,
            release: kubernetes::release()?,
        })
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The release of Kubernetes that its beds run.
    pub fn release(&self) -> &'static str {
        self.release
    }

    /// The same folder, for another release of Kubernetes.
    #[must_use]
    pub fn with_release(mut self, release: &'static str) -> Self {
        self.release = release;
        self
    }

    /// Folder of the Kubernetes programs.
    pub fn kubernetes_dir(&self) -> PathBuf {
        self.root.join(format!("kubernetes-{}", self.release))
    }

    /// A Kubernetes program; `KUBEBUILDER_ASSETS` is looked into first.
    pub fn kubernetes(&self, program: &str) -> PathBuf {
        asset(program).unwrap_or_else(|| self.kubernetes_dir().join(program))
    }

    /// The kwok program.
    pub fn kwok(&self) -> PathBuf {
        self.root.join(format!("kwok-{KWOK}/kwok"))
    }

    /// The etcd program; `KUBEBUILDER_ASSETS` is looked into first.
    pub fn etcd(&self) -> PathBuf {
        asset("etcd").unwrap_or_else(|| self.debian("trixie", "etcd-server").join("usr/bin/etcd"))
    }

    /// Where a package of another Debian suite is unpacked.
    pub fn debian(&self, suite: &str, package: &str) -> PathBuf {
        self.root.join("debian").join(suite).join(package)
    }

    /// What the registry of every bed holds at its start.
    pub fn registry_seed(&self) -> PathBuf {
        self.root.join("images/registry")
    }

    /// Where running beds keep their state.
    pub fn beds(&self) -> PathBuf {
        self.root.join("beds")
    }
}

fn asset(program: &str) -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("KUBEBUILDER_ASSETS")?).join(program);
    path.is_file().then_some(path)
}
