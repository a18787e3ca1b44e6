//! kube-apiserver.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;

use super::certs::Certs;
use super::component::Component;
use super::ports::Ports;
use crate::parts::Cache;
use crate::process::finish;
use crate::sandbox::Sandbox;

/// The first address of the Services' range, where Pods find the API server.
const SERVICE: &str = "10.96.0.1";

/// The names that Pods and people call it by.
const NAMES: [&str; 4] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
];

/// The account of our manager, whose reads are logged, too.
const MANAGER: &str = "system:serviceaccount:kruise-system:kruise-manager";

/// File in the bed's folder with a line of JSON for each write but those of Leases: who, what, result.
pub(super) const AUDIT_LOG: &str = "audit.log";

/// What is the same for every bed.
const FIXED: [&str; 13] = [
    "--service-account-issuer=https://kubernetes.default.svc",
    "--service-cluster-ip-range=10.96.0.0/16",
    "--authorization-mode=Node,RBAC",
    "--enable-admission-plugins=NodeRestriction",
    "--requestheader-allowed-names=front-proxy",
    "--requestheader-username-headers=X-Remote-User",
    "--requestheader-group-headers=X-Remote-Group",
    "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    "--kubelet-preferred-address-types=InternalIP",
    "--allow-privileged=true",
    "--profiling=false",
    // In MB. Ten thousand nodes fill more than the default, and who counts writes reads one file.
    "--audit-log-maxsize=10000",
    "--shutdown-delay-duration=0s",
];

pub(super) fn component(
    cache: &Cache,
    sandbox: &Arc<Sandbox>,
    certs: &Certs,
    ports: &Ports,
    gates: &str,
    admin: &Path,
) -> Result<Component> {
    let audit = sandbox.dir().join("audit-policy.json");
    fs::write(&audit, audit_policy())?;
    let mut args = vec![
        file("audit-policy-file", &audit),
        file("audit-log-path", &sandbox.dir().join(AUDIT_LOG)),
        format!("--etcd-servers=http://{}", ports.at(ports.etcd)),
        format!("--secure-port={}", ports.apiserver),
        format!("--bind-address={}", ports.bind),
        format!("--advertise-address={}", ports.host),
    ];
    args.extend(identity(certs, ports)?);
    args.extend(FIXED.map(str::to_owned));
    if ports.host.contains(':') {
        // Of the same version of IP as its own address; the last of a flag counts.
        args.push("--service-cluster-ip-range=fd00:10:96::/112".into());
    }
    if !gates.is_empty() {
        args.push(format!("--feature-gates={gates}"));
    }
    if !ports.services {
        args.push("--endpoint-reconciler-type=none".into());
    }
    let (kubectl, config) = (cache.kubernetes("kubectl"), admin.to_owned());
    let (host, port) = (ports.host.clone(), ports.apiserver);
    let ready = move || {
        // Nobody is there to be asked yet, and each question is a process.
        if TcpStream::connect((host.as_str(), port)).is_err() {
            return false;
        }
        let mut probe = Command::new(&kubectl);
        probe
            .arg("--kubeconfig")
            .arg(&config)
            .args(["get", "--raw=/readyz", "--request-timeout=2s"]);
        finish(&mut probe).is_ok()
    };
    Ok(
        Component::new(sandbox, "kube-apiserver", cache.kubernetes("kube-apiserver"))
            .args(args)
            .ready(ready),
    )
}

/// Certificates and keys: its own, those that it shows to others, and whom it believes.
fn identity(certs: &Certs, ports: &Ports) -> Result<Vec<String>> {
    let mut names = ["127.0.0.1", SERVICE, ports.host.as_str()]
        .map(|ip| format!("IP:{ip}"))
        .to_vec();
    names.extend(NAMES.map(|name| format!("DNS:{name}")));
    let serving = certs.server("apiserver", &names)?;
    let kubelet = certs.client(
        "apiserver-kubelet",
        "kube-apiserver-kubelet-client",
        &["system:masters"],
    )?;
    let proxy = certs.client("front-proxy", "front-proxy", &[])?;
    let (ca, key) = (certs.ca(), certs.service_account_key());
    Ok(vec![
        file("tls-cert-file", &serving.cert),
        file("tls-private-key-file", &serving.key),
        file("client-ca-file", &ca),
        file("service-account-key-file", &key),
        file("service-account-signing-key-file", &key),
        file("kubelet-client-certificate", &kubelet.cert),
        file("kubelet-client-key", &kubelet.key),
        file("requestheader-client-ca-file", &ca),
        file("proxy-client-cert-file", &proxy.cert),
        file("proxy-client-key-file", &proxy.key),
    ])
}

fn file(flag: &str, path: &Path) -> String {
    format!("--{flag}={}", path.display())
}

fn audit_policy() -> String {
    serde_json::json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "None", "resources": [{ "group": "coordination.k8s.io", "resources": ["leases"] }] },
            { "level": "Metadata", "verbs": ["get", "list"], "users": [MANAGER] },
            { "level": "None", "verbs": ["get", "list", "watch"] },
            { "level": "Metadata" },
        ],
    })
    .to_string()
}
