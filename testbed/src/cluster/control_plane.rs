//! etcd and the API server, with or without controller-manager and scheduler.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::certs::{Certs, Pair};
use super::component::Component;
use super::ports::Ports;
use super::{apiserver, etcd, managers};
use crate::parts::Cache;
use crate::parts::prepare::{self, Part};
use crate::process::{ends_with_us, finish};
use crate::sandbox::Sandbox;
use crate::wait;

/// Begins the field manager of writes that change nothing, by which the end of the audit log is told.
const MARK: &str = "audit-mark-";

/// What a control plane consists of beyond etcd and the API server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Run kube-controller-manager, so that service accounts, garbage collection, EndpointSlices and more work.
    pub controllers: bool,
    /// Which of its controllers, as `NAME,…`; empty for all that it runs by default.
    pub only: &'static str,
    /// Run kube-scheduler.
    pub scheduler: bool,
    /// Feature gates of the API server, as `NAME=true,…`; empty for its own defaults.
    pub gates: &'static str,
    /// In a network of its own that has no IPv4; for etcd and API server alone.
    pub ipv6: bool,
}

/// What a service account token is bound to.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// Nothing.
    Nothing,
    /// A Pod of the account's namespace; with the node it is assigned to in the token's claims.
    Pod(&'a str),
    /// A Node, which is then in the token's claims.
    Node(&'a str),
}

/// A running API server and what it needs. All of it ends on drop.
pub struct ControlPlane {
    /// etcd.
    pub etcd: Component,
    /// kube-apiserver.
    pub apiserver: Component,
    /// kube-controller-manager, where asked for.
    pub controller_manager: Option<Component>,
    /// kube-scheduler, where asked for.
    pub scheduler: Option<Component>,
    cache: Cache,
    certs: Certs,
    server: String,
    store: String,
    admin: PathBuf,
    sandbox: Arc<Sandbox>,
}

/// Tells apart what is made by several tests at once.
static NUMBER: AtomicU32 = AtomicU32::new(0);

impl ControlPlane {
    /// etcd and kube-apiserver alone on free loopback ports: for tests of the API.
    pub fn start() -> Result<Self> {
        Self::start_with(Options::default())
    }

    /// A control plane on free loopback ports, or in a network of its own.
    pub fn start_with(options: Options) -> Result<Self> {
        let cache = Cache::open()?;
        prepare::ensure(&cache, &[Part::Etcd, Part::Kubernetes])?;
        let sandbox = Arc::new(if options.ipv6 {
            Sandbox::without_ipv4(&cache)?
        } else {
            Sandbox::new(&cache, false)?
        });
        let ports = match sandbox.network() {
            Some(net) => Ports::ipv6(net),
            None => Ports::free()?,
        };
        Self::start_in(&cache, sandbox, &ports, options)
    }

    pub(super) fn start_in(
        cache: &Cache,
        sandbox: Arc<Sandbox>,
        ports: &Ports,
        options: Options,
    ) -> Result<Self> {
        let certs = Certs::new(&sandbox.dir().join("certs"))?;
        let server = format!("https://{}", ports.at(ports.apiserver));
        let admin = sandbox.dir().join("admin.kubeconfig");
        let user = certs.client("admin", "admin", &["system:masters"])?;
        fs::write(
            &admin,
            kubeconfig(&server, &certs.ca(), &Login::Certificate(&user)),
        )?;
        let mut etcd = etcd::component(cache, &sandbox, ports);
        let mut apiserver = apiserver::component(cache, &sandbox, &certs, ports, options.gates, &admin)?;
        etcd.start()?;
        apiserver.start()?;
        let mut controller_manager = options
            .controllers
            .then(|| managers::controller_manager(cache, &sandbox, &certs, &admin, ports.controller_manager))
            .map(|manager| match options.only {
                "" => manager,
                only => manager.args([format!("--controllers={only}")]),
            });
        let mut scheduler = options
            .scheduler
            .then(|| managers::scheduler(cache, &sandbox, &admin, ports.scheduler));
        for part in [&mut controller_manager, &mut scheduler].into_iter().flatten() {
            part.start()?;
        }
        let cache = cache.clone();
        Ok(Self {
            etcd,
            apiserver,
            controller_manager,
            scheduler,
            cache,
            certs,
            server,
            store: ports.at(ports.etcd),
            admin,
            sandbox,
        })
    }

    /// URL of the API server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Host and port of etcd, in plain HTTP: for what the API server lets nobody write, such as an object's age.
    pub fn store(&self) -> &str {
        &self.store
    }

    /// Kubeconfig file of an administrator (`system:masters`).
    pub fn kubeconfig(&self) -> &Path {
        &self.admin
    }

    /// PEM file of the authority that signed the API server's certificate.
    pub fn ca(&self) -> PathBuf {
        self.certs.ca()
    }

    /// Every write but those of Leases, as lines of JSON (`audit.k8s.io/v1` events at level Metadata). Dry runs store
    /// nothing and are apart: among them are those by which our programs find out that they are fenced.
    pub fn writes(&self) -> Result<Vec<serde_json::Value>> {
        let mut all = self.requests()?;
        all.retain(|event| !reads(event) && !dry(event));
        Ok(all)
    }

    /// The dry runs, in the same form.
    pub fn dry_runs(&self) -> Result<Vec<serde_json::Value>> {
        let mut all = self.requests()?;
        all.retain(dry);
        Ok(all)
    }

    /// The gets and lists of our manager, but for those of Leases, in the same form.
    pub fn reads_of_manager(&self) -> Result<Vec<serde_json::Value>> {
        let mut all = self.requests()?;
        all.retain(reads);
        Ok(all)
    }

    /// What is in the audit log.
    fn requests(&self) -> Result<Vec<serde_json::Value>> {
        let log = || fs::read_to_string(self.dir().join(apiserver::AUDIT_LOG));
        // Watches tell of a write a moment before it is logged; one that is begun now is logged after it.
        let mark = format!("{MARK}{}-", NUMBER.fetch_add(1, Ordering::Relaxed));
        let manager = format!("--field-manager={mark}");
        let asked = self.kubectl(&["create", "namespace", "mark", "--dry-run=server", &manager]);
        // Without an API server there is nothing to come.
        if asked.is_ok() {
            wait::until("the end of the audit log", Duration::from_secs(30), || {
                Ok(log()?.contains(&mark).then_some(()))
            })?;
        }
        // The last line may still be on its way.
        Ok(log()?
            .lines()
            .filter(|line| !line.contains(MARK))
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect())
    }

    /// A folder that goes with the bed; logs are here as `NAME.log`.
    pub fn dir(&self) -> &Path {
        self.sandbox.dir()
    }

    /// A program of ours that runs in the bed and ends with it.
    pub fn component(&self, name: &'static str, program: impl Into<PathBuf>) -> Component {
        Component::new(&self.sandbox, name, program)
    }

    /// Runs a program of the machine inside the bed and returns what it prints.
    pub fn inside(&self, program: &str, args: &[&str]) -> Result<String> {
        finish(&mut ends_with_us(self.sandbox.command(program).args(args)))
    }

    /// Runs kubectl as the administrator and returns what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        finish(&mut ends_with_us(self.kubectl_command().args(args)))
    }

    /// kubectl as the administrator, to be given arguments and run.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new(self.cache.kubernetes("kubectl"));
        command.env("KUBECONFIG", &self.admin);
        command
    }

    /// Applies a manifest (YAML or JSON, several documents allowed).
    pub fn apply(&self, manifest: &str) -> Result<String> {
        let mut command = self.kubectl_command();
        command.args(["apply", "--server-side", "--force-conflicts", "-f", "-"]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child
            .stdin
            .take()
            .context("no pipe to kubectl")?
            .write_all(manifest.as_bytes())?;
        let out = child.wait_with_output()?;
        if !out.status.success() {
            bail!("kubectl apply failed: {}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// A token of a service account, which must exist, valid for a day: longer than any test runs.
    pub fn token(&self, namespace: &str, account: &str, bound: Bound<'_>) -> Result<String> {
        let mut args = vec![
            "create",
            "token",
            account,
            "--namespace",
            namespace,
            "--duration=24h",
        ];
        match bound {
            Bound::Nothing => {}
            Bound::Pod(name) => args.extend(["--bound-object-kind=Pod", "--bound-object-name", name]),
            Bound::Node(name) => args.extend(["--bound-object-kind=Node", "--bound-object-name", name]),
        }
        Ok(self.kubectl(&args)?.trim().to_owned())
    }

    /// Kubeconfig file of a service account with a token as [`ControlPlane::token`] makes it.
    pub fn kubeconfig_for(&self, namespace: &str, account: &str, bound: Bound<'_>) -> Result<PathBuf> {
        let token = self.token(namespace, account, bound)?;
        let what = match bound {
            Bound::Nothing => String::new(),
            Bound::Pod(name) | Bound::Node(name) => format!("-{name}"),
        };
        let path = self.dir().join(format!("{namespace}-{account}{what}.kubeconfig"));
        // Another test may be reading one of the same name.
        let aside = path.with_extension(NUMBER.fetch_add(1, Ordering::Relaxed).to_string());
        fs::write(
            &aside,
            kubeconfig(&self.server, &self.ca(), &Login::Token(&token)),
        )?;
        fs::rename(&aside, &path)?;
        Ok(path)
    }

    pub(super) fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    /// Kubeconfig file of a user with a client certificate: user name and groups.
    pub fn kubeconfig_as(&self, file: &str, user: &str, groups: &[&str]) -> Result<PathBuf> {
        let pair = self.certs.client(file, user, groups)?;
        let path = self.dir().join(format!("{file}.kubeconfig"));
        fs::write(
            &path,
            kubeconfig(&self.server, &self.ca(), &Login::Certificate(&pair)),
        )?;
        Ok(path)
    }
}

fn reads(event: &serde_json::Value) -> bool {
    matches!(event["verb"].as_str(), Some("get" | "list"))
}

fn dry(event: &serde_json::Value) -> bool {
    event["requestURI"]
        .as_str()
        .is_some_and(|uri| uri.contains("dryRun=All"))
}

enum Login<'a> {
    Certificate(&'a Pair),
    Token(&'a str),
}

fn kubeconfig(server: &str, ca: &Path, login: &Login<'_>) -> String {
    let user = match login {
        Login::Certificate(pair) => serde_json::json!({
            "client-certificate": pair.cert,
            "client-key": pair.key,
        }),
        Login::Token(token) => serde_json::json!({ "token": token }),
    };
    serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bed",
        "clusters": [{ "name": "bed", "cluster": { "server": server, "certificate-authority": ca } }],
        "users": [{ "name": "bed", "user": user }],
        "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": "bed" } }],
    })
    .to_string()
}
