//! Credentials of the node itself, as kubelet has them: its Docker configuration, and credential provider plugins.
//!
//! In:  `--plugin-config-file`, `--plugin-bin-dir`, Docker's configuration files, the output of plugins.
//! Out: credentials for a repository, tried after those of pull secrets.
//!
//! Any Pod on a node may use its credentials, and so may any job.

mod cache;
mod config;
pub(crate) mod exec;
mod response;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::plan::keyring::{Credentials, Keyring, TYPE_CFG};
use cache::Cache;
use config::{MAX_CONFIG_BYTES, Provider};
use kruise_ops::metrics::metrics;

/// Pulls of the same repository share a failure for this time, the shortest back-off of a pull.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// Failures that are kept.
const MAX_FAILURES: usize = 1000;
/// Time for the credentials of one repository: of all its plugins, and behind another pull that calls them.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2 * exec::TIMEOUT.as_secs() + 5);
/// Maximum bytes of a Docker configuration file.
const MAX_DOCKER_CONFIG_BYTES: u64 = 1 << 20;
/// Time for reading a file.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Name of a Docker configuration file in errors.
const DOCKER_CONFIG: &str = "config.json";

/// The credentials of the node.
#[derive(Debug, Default)]
pub struct NodeCredentials {
    directory: PathBuf,
    plugins: Vec<Plugin>,
    /// Why there are no plugins, although there is a configuration.
    problem: Option<String>,
}

/// A plugin and its state.
#[derive(Debug)]
struct Plugin {
    provider: Provider,
    /// By repository, held during a call: of several pulls that need the same credentials, one calls.
    calls: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
    state: Mutex<PluginState>,
}

#[derive(Debug, Default)]
struct PluginState {
    cache: Cache,
    /// Failures by repository, and until when they count.
    failed: HashMap<String, (String, Instant)>,
}

impl Plugin {
    fn state(&self) -> MutexGuard<'_, PluginState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result for a repository that is known without a call.
    fn known(&self, repository: &str) -> Option<Result<Vec<Credentials>, String>> {
        let (state, now) = (self.state(), Instant::now());
        if let Some(keyring) = state.cache.get(repository, now) {
            return Some(Ok(keyring.lookup(repository)));
        }
        let failed = state.failed.get(repository).filter(|(_, until)| now < *until);
        failed.map(|(why, _)| Err(why.clone()))
    }

    /// The lock for calls for a repository.
    fn call_lock(&self, repository: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.retain(|_, lock| lock.strong_count() > 0);
        let lock = calls.get(repository).and_then(Weak::upgrade).unwrap_or_default();
        calls.insert(repository.to_owned(), Arc::downgrade(&lock));
        lock
    }

    async fn lookup(&self, directory: &Path, repository: &str) -> Result<Vec<Credentials>, String> {
        if let Some(known) = self.known(repository) {
            return known;
        }
        let lock = self.call_lock(repository);
        let _calling = lock.lock().await;
        if let Some(known) = self.known(repository) {
            return known;
        }
        let provider = &self.provider;
        let begin = Instant::now();
        let mut command = Command::new(directory.join(&provider.name));
        command
            .args(&provider.args)
            .envs(provider.env.iter().map(|(name, value)| (name, value)));
        let request = response::request(provider, repository);
        let output = exec::run(command, &provider.name, &request).await;
        let parsed = output
            .map_err(|why| why.to_string())
            .and_then(|output| response::parse(provider, &output).map_err(str::to_owned));
        let result = if parsed.is_ok() { "succeeded" } else { "failed" };
        let labels = [("plugin", provider.name.clone()), ("result", result.to_owned())];
        metrics()
            .credential_plugins
            .get_or_create(&labels)
            .observe(begin.elapsed().as_secs_f64());
        let (mut state, now) = (self.state(), Instant::now());
        match parsed {
            Ok(credentials) => {
                state.failed.remove(repository);
                state.cache.insert(repository, &credentials, now);
                Ok(credentials.keyring.lookup(repository))
            }
            Err(why) => {
                tracing::warn!(
                    plugin = provider.name,
                    repository,
                    why,
                    "credential provider plugin returned no credentials"
                );
                state.failed.retain(|_, (_, until)| now < *until);
                if state.failed.len() < MAX_FAILURES {
                    let failure = (why.clone(), now + FAILURE_TTL);
                    state.failed.insert(repository.to_owned(), failure);
                }
                Err(why)
            }
        }
    }
}

/// The credentials for a repository, and why some may be missing.
#[derive(Debug, Default, PartialEq)]
pub struct NodeLookup {
    /// To try in this order, after those of pull secrets.
    pub credentials: Vec<Credentials>,
    /// For the message of a pull that fails.
    pub problems: Vec<String>,
}

impl NodeCredentials {
    /// Reads the plugins' configuration, once, as kubelet does. Without the file there are no plugins.
    pub async fn load(config_file: Option<&Path>, directory: Option<&Path>) -> Self {
        let Some(path) = config_file else {
            return Self::default();
        };
        let read = match read_file(path, MAX_CONFIG_BYTES).await {
            Ok(None) => return Self::default(),
            Ok(Some(bytes)) => String::from_utf8(bytes)
                .map_err(|_| "it is not text".to_owned())
                .and_then(|text| config::parse(&text)),
            Err(why) => Err(why),
        };
        let directory = directory.unwrap_or(Path::new("")).to_owned();
        match read {
            Ok(providers) => {
                let names: Vec<&str> = providers.iter().map(|provider| provider.name.as_str()).collect();
                tracing::info!(?names, directory = %directory.display(), "credential provider plugins");
                let plugins = providers.into_iter().map(|provider| Plugin {
                    provider,
                    calls: Mutex::default(),
                    state: Mutex::default(),
                });
                Self {
                    directory,
                    plugins: plugins.collect(),
                    problem: None,
                }
            }
            Err(why) => {
                let problem = format!(
                    "credential provider plugins are not used: {}: {why}",
                    path.display()
                );
                tracing::error!(path = %path.display(), why, "credential provider plugins are not used");
                Self {
                    directory,
                    plugins: Vec::new(),
                    problem: Some(problem),
                }
            }
        }
    }

    /// The credentials for a repository (`HOST/PATH`).
    pub async fn lookup(&self, repository: &str) -> NodeLookup {
        let mut found = NodeLookup::default();
        found.problems.extend(self.problem.clone());
        match docker_config(&docker_config_paths()).await {
            Ok(keyring) => found.credentials.extend(keyring.lookup(repository)),
            Err(why) => found.problems.push(why),
        }
        let deadline = tokio::time::Instant::now() + LOOKUP_TIMEOUT;
        let serving = self
            .plugins
            .iter()
            .filter(|plugin| plugin.provider.serves(repository));
        for plugin in serving {
            let name = &plugin.provider.name;
            if plugin.provider.requires_service_account {
                let why = "requires the service account of a Pod, and a job has none";
                found.problems.push(format!("credential provider {name:?} {why}"));
                continue;
            }
            let lookup = plugin.lookup(&self.directory, repository);
            let result = tokio::time::timeout_at(deadline, lookup).await;
            match result.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) {
                Ok(credentials) => found.credentials.extend(credentials),
                Err(why) => found
                    .problems
                    .push(format!("credential provider {name:?}: {why}")),
            }
        }
        found
    }
}

/// Where kubelet looks for the Docker configuration; the first file that exists counts. The second of each pair is
/// whether it is in the older format.
fn docker_config_paths() -> Vec<(PathBuf, bool)> {
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .filter(|home| home.is_absolute());
    let kubelet = PathBuf::from("/var/lib/kubelet");
    let root = PathBuf::from("/");
    let docker = |home: &PathBuf| home.join(".docker");
    let json = [
        Some(kubelet.clone()),
        home.as_ref().map(docker),
        Some(docker(&root)),
    ];
    let json = json
        .into_iter()
        .flatten()
        .map(|directory| (directory.join(DOCKER_CONFIG), false));
    let older = [Some(kubelet), home, Some(root)];
    let older = older
        .into_iter()
        .flatten()
        .map(|directory| (directory.join(".dockercfg"), true));
    json.chain(older).collect()
}

/// The first of these files that exists. Read for each lookup, because a renewal must not require a restart.
async fn docker_config(paths: &[(PathBuf, bool)]) -> Result<Keyring, String> {
    let mut keyring = Keyring::default();
    for (path, is_older) in paths {
        let problem =
            |why: &dyn std::fmt::Display| format!("the node's {} cannot be used: {why}", path.display());
        let bytes = match read_file(path, MAX_DOCKER_CONFIG_BYTES).await {
            Ok(None) => continue,
            Ok(Some(bytes)) => bytes,
            Err(why) => return Err(problem(&why)),
        };
        let added = if *is_older {
            keyring.add_secret(TYPE_CFG, |_| Some(&bytes))
        } else {
            keyring.add_config_json(&bytes, DOCKER_CONFIG)
        };
        return added.map(|_| keyring).map_err(|why| problem(&why));
    }
    Ok(keyring)
}

/// Reads a regular file; `None` if there is none.
async fn read_file(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, String> {
    let read = async {
        let metadata = tokio::fs::metadata(path).await?;
        // Others may block for ever.
        if !metadata.is_file() {
            return Err(std::io::Error::other("it is not a file"));
        }
        let mut bytes = Vec::new();
        let file = tokio::fs::File::open(path).await?;
        file.take(max_bytes.saturating_add(1))
            .read_to_end(&mut bytes)
            .await?;
        Ok(bytes)
    };
    match tokio::time::timeout(READ_TIMEOUT, read).await {
        Ok(Ok(bytes)) if bytes.len() as u64 > max_bytes => Err(format!("it has more than {max_bytes} bytes")),
        Ok(Ok(bytes)) => Ok(Some(bytes)),
        Ok(Err(why)) if why.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Ok(Err(why)) => Err(why.to_string()),
        Err(_) => Err(format!("it cannot be read within {} s", READ_TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests;
