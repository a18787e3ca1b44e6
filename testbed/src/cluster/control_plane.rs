//! etcd and the API server, with or without controller-manager and scheduler.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::audit_log::{self, AuditLog};
use super::certs::{Certs, KeyPair};
use super::component::Component;
use super::ports::Ports;
use super::{apiserver, etcd, managers};
use crate::parts::prepare::{self, Part};
use crate::parts::{Cache, kubernetes};
use crate::process::{run_command, with_parent_death_signal};
use crate::sandbox::Sandbox;
use crate::wait;

/// Components and settings of a control plane beyond etcd and the API server.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlPlaneOptions {
    /// Run kube-controller-manager, so that service accounts, garbage collection, EndpointSlices and more work.
    pub controllers: bool,
    /// Controllers to run, as `NAME,…`; empty for the default ones.
    pub enabled_controllers: &'static str,
    /// Run kube-scheduler.
    pub scheduler: bool,
    /// Feature gates of the API server, as `NAME=true,…`; empty for its own defaults.
    pub feature_gates: &'static str,
    /// Use the sandbox's own network without IPv4; only for etcd and API server.
    pub ipv6: bool,
}

/// The object that a service account token is bound to.
#[derive(Clone, Copy, Debug)]
pub enum TokenBinding<'a> {
    /// Not bound to an object.
    Unbound,
    /// A Pod in the account's namespace; the token's claims contain the Pod's node.
    Pod(&'a str),
    /// A Node; the token's claims contain it.
    Node(&'a str),
}

/// A running API server and its dependencies. Drop ends all of it.
pub struct ControlPlane {
    /// etcd.
    pub etcd: Component,
    /// kube-apiserver.
    pub apiserver: Component,
    /// kube-controller-manager, if requested.
    pub controller_manager: Option<Component>,
    /// kube-scheduler, if requested.
    pub scheduler: Option<Component>,
    cache: Cache,
    certs: Certs,
    server: String,
    etcd_address: String,
    admin: PathBuf,
    audit_log: AuditLog,
    sandbox: Arc<Sandbox>,
}

/// Makes names unique among tests that run at once.
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

impl ControlPlane {
    /// Starts only etcd and kube-apiserver on free loopback ports: for API tests.
    pub fn start() -> Result<Self> {
        Self::start_with(ControlPlaneOptions::default())
    }

    /// Starts a control plane on free loopback ports, or in its own network.
    pub fn start_with(options: ControlPlaneOptions) -> Result<Self> {
        let cache = Cache::open()?;
        prepare::ensure(&cache, &[Part::Etcd, Part::Kubernetes])?;
        let sandbox = Arc::new(if options.ipv6 {
            Sandbox::without_ipv4(&cache)?
        } else {
            Sandbox::new(&cache, false)?
        });
        let ports = match sandbox.network() {
            Some(net) => Ports::ipv6(net),
            None => Ports::reserve()?,
        };
        Self::start_in_sandbox(&cache, sandbox, &ports, options)
    }

    pub(super) fn start_in_sandbox(
        cache: &Cache,
        sandbox: Arc<Sandbox>,
        ports: &Ports,
        options: ControlPlaneOptions,
    ) -> Result<Self> {
        let certs = Certs::new(&sandbox.dir().join("certs"))?;
        let server = format!("https://{}", ports.host_port(ports.apiserver));
        let admin = sandbox.dir().join("admin.kubeconfig");
        let user = certs.client("admin", "admin", &["system:masters"])?;
        fs::write(
            &admin,
            kubeconfig(&server, &certs.ca(), &Login::Certificate(&user)),
        )?;
        let mut etcd = etcd::component(cache, &sandbox, ports);
        let mut apiserver = apiserver::component(cache, &sandbox, &certs, ports, options.feature_gates)?;
        etcd.start()?;
        apiserver.start()?;
        let mut controller_manager = options
            .controllers
            .then(|| managers::controller_manager(cache, &sandbox, &certs, &admin, ports.controller_manager))
            .map(|manager| match options.enabled_controllers {
                "" => manager,
                only => manager.args([format!("--controllers={only}")]),
            });
        let mut scheduler = options
            .scheduler
            .then(|| managers::scheduler(cache, &sandbox, &admin, ports.scheduler));
        for component in [&mut controller_manager, &mut scheduler].into_iter().flatten() {
            component.start()?;
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
            etcd_address: ports.host_port(ports.etcd),
            admin,
            audit_log: AuditLog::new(sandbox.dir().join(apiserver::AUDIT_LOG)),
            sandbox,
        })
    }

    /// URL of the API server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Host and port of etcd, in plain HTTP: for fields that the API server lets no client write, such as an
    /// object's age.
    pub fn etcd_address(&self) -> &str {
        &self.etcd_address
    }

    /// Kubeconfig file of an administrator (`system:masters`).
    pub fn kubeconfig(&self) -> &Path {
        &self.admin
    }

    /// PEM file of the authority that signed the API server's certificate.
    pub fn ca(&self) -> PathBuf {
        self.certs.ca()
    }

    /// All writes except those of Leases, as JSON (`audit.k8s.io/v1` events at level Metadata). Dry runs store nothing
    /// and are not included: our programs use some of them to detect that they are fenced.
    pub fn audited_writes(&self) -> Result<Vec<serde_json::Value>> {
        self.audit_events(|event| !is_read(event) && !is_dry_run(event))
    }

    /// Dry runs, as the same events.
    pub fn dry_runs(&self) -> Result<Vec<serde_json::Value>> {
        self.audit_events(is_dry_run)
    }

    /// Gets and lists of our manager except those of Leases, as the same events.
    pub fn manager_reads(&self) -> Result<Vec<serde_json::Value>> {
        self.audit_events(is_read)
    }

    /// The events of the audit log that count.
    fn audit_events(&self, counts: impl Fn(&serde_json::Value) -> bool) -> Result<Vec<serde_json::Value>> {
        // A watch may report a write before the write is logged; a write that starts now is logged after it.
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}{id}-", audit_log::MARK_PREFIX);
        let field_manager_flag = format!("--field-manager={mark}");
        let marked = self.kubectl(&[
            "create",
            "namespace",
            "mark",
            "--dry-run=server",
            &field_manager_flag,
        ]);
        // Without an API server there are no further events.
        if marked.is_ok() {
            wait::until("the end of the audit log", Duration::from_secs(30), || {
                Ok(self.audit_log.has_mark(&mark)?.then_some(()))
            })?;
        }
        self.audit_log.events(counts)
    }

    /// Folder with the logs, as `NAME.log`; removed with the sandbox.
    pub fn dir(&self) -> &Path {
        self.sandbox.dir()
    }

    /// One of our programs, which runs in the sandbox and ends with it.
    pub fn component(&self, name: &'static str, program: impl Into<PathBuf>) -> Component {
        Component::new(&self.sandbox, name, program)
    }

    /// Runs a program of the machine inside the sandbox and returns what it prints.
    pub fn run_inside(&self, program: &str, args: &[&str]) -> Result<String> {
        run_command(&mut with_parent_death_signal(
            self.sandbox.command(program).args(args),
        ))
    }

    /// Runs kubectl as the administrator and returns what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        run_command(&mut with_parent_death_signal(self.kubectl_command().args(args)))
    }

    /// A kubectl command as the administrator, without arguments.
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

    /// Whether the API server serves MutatingAdmissionPolicy v1.
    ///
    /// # Errors
    /// If it does not although its release should: tests of policies would end without testing anything.
    pub fn serves_mutating_policies(&self) -> Result<bool> {
        let resources = self.kubectl(&["get", "--raw", "/apis/admissionregistration.k8s.io/v1"])?;
        let served = resources.contains("mutatingadmissionpolicies");
        let release = self.cache.release();
        if served != kubernetes::at_least(release, 36) {
            bail!("Kubernetes {release} serves mutatingadmissionpolicies: {served}");
        }
        Ok(served)
    }

    /// Creates a token of an existing service account, valid for a day: longer than any test runs.
    pub fn token(&self, namespace: &str, account: &str, binding: TokenBinding<'_>) -> Result<String> {
        let mut args = vec![
            "create",
            "token",
            account,
            "--namespace",
            namespace,
            "--duration=24h",
        ];
        match binding {
            TokenBinding::Unbound => {}
            TokenBinding::Pod(name) => args.extend(["--bound-object-kind=Pod", "--bound-object-name", name]),
            TokenBinding::Node(name) => {
                args.extend(["--bound-object-kind=Node", "--bound-object-name", name])
            }
        }
        Ok(self.kubectl(&args)?.trim().to_owned())
    }

    /// Kubeconfig file of a service account with a token from [`ControlPlane::token`].
    pub fn kubeconfig_for(
        &self,
        namespace: &str,
        account: &str,
        binding: TokenBinding<'_>,
    ) -> Result<PathBuf> {
        let token = self.token(namespace, account, binding)?;
        let what = match binding {
            TokenBinding::Unbound => String::new(),
            TokenBinding::Pod(name) | TokenBinding::Node(name) => format!("-{name}"),
        };
        let path = self.dir().join(format!("{namespace}-{account}{what}.kubeconfig"));
        // As in a Pod, the token is in a file, which no other kubeconfig names.
        let token_path = path.with_extension(format!("{}.token", NEXT_ID.fetch_add(1, Ordering::Relaxed)));
        let config = kubeconfig(&self.server, &self.ca(), &Login::TokenFile(&token_path));
        for (path, text) in [(&token_path, &token), (&path, &config)] {
            // Another test may be reading a file of the same name.
            let temp_path = path.with_extension(NEXT_ID.fetch_add(1, Ordering::Relaxed).to_string());
            fs::write(&temp_path, text)?;
            fs::rename(&temp_path, path)?;
        }
        Ok(path)
    }

    /// An address of the API server's host with another port, as in a URL.
    pub fn host_port(&self, port: u16) -> String {
        let host = self.server.trim_start_matches("https://");
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        format!("{host}:{port}")
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

fn is_read(event: &serde_json::Value) -> bool {
    matches!(event["verb"].as_str(), Some("get" | "list"))
}

fn is_dry_run(event: &serde_json::Value) -> bool {
    event["requestURI"]
        .as_str()
        .is_some_and(|uri| uri.contains("dryRun=All"))
}

enum Login<'a> {
    Certificate(&'a KeyPair),
    TokenFile(&'a Path),
}

fn kubeconfig(server: &str, ca: &Path, login: &Login<'_>) -> String {
    let user = match login {
        Login::Certificate(pair) => serde_json::json!({
            "client-certificate": pair.cert,
            "client-key": pair.key,
        }),
        Login::TokenFile(path) => serde_json::json!({ "tokenFile": path }),
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
