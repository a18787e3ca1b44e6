//! Credentials of the node itself, as kubelet has them: its Docker configuration, and credential provider plugins.
//!
//! In:  `--plugin-config-file`, `--plugin-bin-dir`, Docker's configuration files, the output of plugins, the service
//!      accounts of jobs and tokens of these.
//! Out: credentials for a repository, tried after those of pull secrets.
//!
//! Any Pod on a node may use its credentials, and so may any job. What a plugin returns for the token of a service
//! account belongs to the jobs of its namespace.

mod account_key;
mod cache;
mod call_locks;
mod config;
pub(crate) mod exec;
mod response;
pub(super) mod service_accounts;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout_at;

use super::plan::AttemptRetry;
use super::plan::keyring::{Credentials, Keyring, TYPE_CFG};
use account_key::AccountKey;
use cache::Cache;
use call_locks::CallLocks;
use config::{MAX_CONFIG_BYTES, Provider, TokenAttributes};
use kruise_api::node_image::ServiceAccountReference;
use kruise_ops::metrics::metrics;
use service_accounts::{Account, PluginAccount, ServiceAccounts};

/// Pulls of the same repository share a failure for this time, the shortest back-off of a pull.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// Failures that are kept.
const MAX_FAILURES: usize = 1000;
/// Time for the credentials of one repository: of all its plugins, and behind another pull that calls them. Those for
/// service accounts have as much.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2 * exec::TIMEOUT.as_secs() + 5);
/// Maximum number of problems with service accounts that a message names.
const MAX_ACCOUNT_PROBLEMS: usize = 5;
/// The problems with service accounts, in a message that the owners of several namespaces read.
const HIDDEN_ACCOUNT_PROBLEMS: &str = "credentials of a service account are missing; jobs of several namespaces \
    request the image, so only the daemon's log says why";
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
    /// Held during a call: of several pulls that need the same credentials, one calls.
    calls: CallLocks<CallKey>,
    state: Mutex<PluginState>,
}

/// What a plugin is called for: a repository, and a service account if there is one.
type CallKey = (String, Option<AccountKey>);

#[derive(Debug, Default)]
struct PluginState {
    cache: Cache,
    /// Failures, and until when they count.
    failed: HashMap<CallKey, (String, Instant)>,
}

impl Plugin {
    fn state(&self) -> MutexGuard<'_, PluginState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result that is known without a call.
    fn known(&self, key: &CallKey) -> Option<Result<Vec<Credentials>, String>> {
        let (state, now) = (self.state(), Instant::now());
        let (repository, account) = key;
        if let Some(keyring) = state.cache.get(repository, *account, now) {
            return Some(Ok(keyring.lookup(repository)));
        }
        let failed = state.failed.get(key).filter(|(_, until)| now < *until);
        failed.map(|(why, _)| Err(why.clone()))
    }

    async fn lookup(
        &self,
        directory: &Path,
        repository: &str,
        account: Option<&PluginAccount>,
    ) -> Result<Vec<Credentials>, String> {
        let key: CallKey = (repository.to_owned(), account.map(|account| account.key));
        if let Some(known) = self.known(&key) {
            return known;
        }
        let lock = self.calls.get(&key);
        let _calling = lock.lock().await;
        if let Some(known) = self.known(&key) {
            return known;
        }
        let provider = &self.provider;
        let begin = Instant::now();
        let mut command = Command::new(directory.join(&provider.name));
        command
            .args(&provider.args)
            .envs(provider.env.iter().map(|(name, value)| (name, value)));
        let request = response::request(provider, repository, account);
        let token = account.map(|account| &*account.token);
        let output = exec::run(command, &provider.name, &request, token).await;
        let parsed = output
            .map_err(|why| why.to_string())
            .and_then(|output| response::parse(provider, account, &output).map_err(str::to_owned));
        let result = if parsed.is_ok() { "succeeded" } else { "failed" };
        let labels = [("plugin", provider.name.clone()), ("result", result.to_owned())];
        metrics()
            .credential_plugins
            .get_or_create(&labels)
            .observe(begin.elapsed().as_secs_f64());
        let (mut state, now) = (self.state(), Instant::now());
        match parsed {
            Ok(credentials) => {
                state.failed.remove(&key);
                state.cache.insert(repository, key.1, &credentials, now);
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
                    state.failed.insert(key, (why.clone(), now + FAILURE_TTL));
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
                    calls: CallLocks::default(),
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

    /// The credentials for a repository (`HOST/PATH`). Plugins that get tokens of service accounts are called without
    /// one only if `without_account`, that is, if there is a job that names none.
    pub async fn lookup(&self, repository: &str, without_account: bool) -> NodeLookup {
        let mut found = NodeLookup::default();
        found.problems.extend(self.problem.clone());
        match docker_config(&docker_config_paths()).await {
            Ok(keyring) => found.credentials.extend(keyring.lookup(repository)),
            Err(why) => found.problems.push(why),
        }
        let deadline = tokio::time::Instant::now() + LOOKUP_TIMEOUT;
        for plugin in self.serving(repository) {
            let name = &plugin.provider.name;
            match &plugin.provider.service_account {
                Some(_) if !without_account => continue,
                Some(token) if token.is_required => {
                    let why = "requires a service account, and a job of this image has no serviceAccountName";
                    found.problems.push(format!("credential provider {name:?} {why}"));
                    continue;
                }
                _ => {}
            }
            let lookup = plugin.lookup(&self.directory, repository, None);
            match timeout_at(deadline, lookup).await.unwrap_or_else(|_| timed_out()) {
                Ok(credentials) => found.credentials.extend(credentials),
                Err(why) => found
                    .problems
                    .push(format!("credential provider {name:?}: {why}")),
            }
        }
        found
    }

    fn serving(&self, repository: &str) -> impl Iterator<Item = &Plugin> {
        self.plugins
            .iter()
            .filter(move |plugin| plugin.provider.serves(repository))
    }

    /// The credentials that plugins return for a repository and tokens of these service accounts.
    pub async fn lookup_accounts(
        &self,
        repository: &str,
        references: &[ServiceAccountReference],
        accounts: &ServiceAccounts,
    ) -> AccountLookup {
        let mut found = AccountLookup::default();
        let with_token = self.serving(repository);
        let with_token = with_token
            .filter_map(|plugin| Some((plugin, plugin.provider.service_account.as_ref()?)))
            .collect::<Vec<_>>();
        if with_token.is_empty() {
            return found;
        }
        let deadline = tokio::time::Instant::now() + LOOKUP_TIMEOUT;
        for reference in references {
            let ServiceAccountReference { namespace, name } = reference;
            let Ok(read) = timeout_at(deadline, accounts.read(reference)).await else {
                let problem =
                    format!("service account {namespace}/{name} is not used: plugins took too long");
                found.add_problem(problem, None);
                break;
            };
            let account = match read {
                Ok(account) => account,
                Err(error) => {
                    let problem = format!("service account {namespace}/{name} cannot be used: {error}");
                    found.add_problem(problem, error.retry());
                    if matches!(error, service_accounts::Error::Timeout) {
                        // The API server does not answer for the others, either.
                        break;
                    }
                    continue;
                }
            };
            for (plugin, attributes) in &with_token {
                let lookup = self.lookup_account(plugin, attributes, repository, &account, accounts);
                let result = timeout_at(deadline, lookup).await;
                match result.unwrap_or_else(|_| timed_out().map_err(|why| (why, None))) {
                    Ok(credentials) => found.credentials.push((namespace.clone(), credentials)),
                    Err((why, retry)) => {
                        let plugin = &plugin.provider.name;
                        let problem = format!(
                            "credential provider {plugin:?}, service account {namespace}/{name}: {why}"
                        );
                        found.add_problem(problem, retry);
                    }
                }
            }
        }
        found
    }

    /// The credentials that a plugin returns for the token of a service account; an error is its reason, and how the
    /// attempt is retried.
    async fn lookup_account(
        &self,
        plugin: &Plugin,
        attributes: &TokenAttributes,
        repository: &str,
        account: &Account,
        accounts: &ServiceAccounts,
    ) -> Result<Vec<Credentials>, (String, Option<AttemptRetry>)> {
        let annotations = attributes
            .select_annotations(&account.annotations)
            .map_err(|missing| (format!("it has no annotation {missing:?}"), None::<AttemptRetry>))?;
        let token = accounts
            .token(account, &attributes.audience)
            .await
            .map_err(|error| (format!("no token: {error}"), error.retry()))?;
        let Account {
            namespace, name, uid, ..
        } = account;
        let identity = [namespace.as_str(), name.as_str(), uid.as_str()];
        let account = PluginAccount::new(identity, annotations, token, attributes.cache_type);
        let lookup = plugin.lookup(&self.directory, repository, Some(&account));
        lookup.await.map_err(|why| (why, None))
    }
}

fn timed_out<T>() -> Result<T, String> {
    Err("it did not answer in time".to_owned())
}

/// Credentials of service accounts, and why some may be missing.
#[derive(Debug, Default, PartialEq)]
pub struct AccountLookup {
    /// Each with the namespace of its service account, in the order to try them.
    pub credentials: Vec<(String, Vec<Credentials>)>,
    /// For the message of a pull that fails.
    pub problems: Vec<String>,
    /// How an attempt that the registry rejects is retried, if a service account or a token is missing for a reason that
    /// may pass.
    pub unread_retry: Option<AttemptRetry>,
}

impl AccountLookup {
    fn add_problem(&mut self, problem: String, retry: Option<AttemptRetry>) {
        self.unread_retry = self.unread_retry.max(retry);
        if self.problems.len() < MAX_ACCOUNT_PROBLEMS {
            self.problems.push(problem);
        }
    }
}

/// The problems with service accounts for the message of a tag with these owners. If they are of several namespaces,
/// they do not learn the accounts of one another, which the API server's errors name too: the problems are logged.
pub fn shown_account_problems(
    problems: Vec<String>,
    repository: &str,
    owners: &[ObjectReference],
) -> Vec<String> {
    let namespaces: BTreeSet<_> = owners.iter().map(|owner| owner.namespace.as_deref()).collect();
    if problems.is_empty() || namespaces.len() <= 1 {
        return problems;
    }
    for problem in problems {
        tracing::warn!(
            repository,
            problem,
            "credentials of a service account are missing"
        );
    }
    vec![HIDDEN_ACCOUNT_PROBLEMS.to_owned()]
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
