//! kube-apiserver.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::certs::Certs;
use super::component::Component;
use super::ports::Ports;
use super::readyz::Readyz;
use crate::parts::Cache;
use crate::sandbox::Sandbox;

/// The first address of the Service range, at which Pods reach the API server.
const SERVICE_IP: &str = "10.96.0.1";

/// DNS names of the API server for Pods and users.
const DNS_NAMES: [&str; 4] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
];

/// The service account of our manager, whose reads are also logged.
const MANAGER_USER: &str = "system:serviceaccount:kruise-system:kruise-manager";

/// File in the sandbox's folder with a line of JSON for each write except writes of Leases: user, object, result.
pub(super) const AUDIT_LOG: &str = "audit.log";

/// Flags that are the same for every test cluster.
const FIXED_FLAGS: [&str; 13] = [
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
    // In MB. Ten thousand nodes fill more than the default, and code that counts writes reads one file.
    "--audit-log-maxsize=10000",
    "--shutdown-delay-duration=0s",
];

pub(super) fn component(
    cache: &Cache,
    sandbox: &Arc<Sandbox>,
    certs: &Certs,
    ports: &Ports,
    gates: &str,
) -> Result<Component> {
    let audit = sandbox.dir().join("audit-policy.json");
    fs::write(&audit, audit_policy())?;
    let mut args = vec![
        path_flag("audit-policy-file", &audit),
        path_flag("audit-log-path", &sandbox.dir().join(AUDIT_LOG)),
        format!("--etcd-servers=http://{}", ports.host_port(ports.etcd)),
        format!("--secure-port={}", ports.apiserver),
        format!("--bind-address={}", ports.bind),
        format!("--advertise-address={}", ports.host),
    ];
    args.extend(tls_flags(certs, ports)?);
    args.extend(FIXED_FLAGS.map(str::to_owned));
    if ports.host.contains(':') {
        // The IP version must be that of the API server's own address; the last value of a flag counts.
        args.push("--service-cluster-ip-range=fd00:10:96::/112".into());
    }
    if !gates.is_empty() {
        args.push(format!("--feature-gates={gates}"));
    }
    if !ports.endpoint_reconciler {
        args.push("--endpoint-reconciler-type=none".into());
    }
    let readyz = Readyz::new(&ports.host, ports.apiserver, &certs.ca())?;
    Ok(
        Component::new(sandbox, "kube-apiserver", cache.kubernetes("kube-apiserver"))
            .args(args)
            .ready(move || readyz.is_ready()),
    )
}

/// Certificates and keys: serving, client, and those of the authorities that the API server trusts.
fn tls_flags(certs: &Certs, ports: &Ports) -> Result<Vec<String>> {
    let mut names = ["127.0.0.1", SERVICE_IP, ports.host.as_str()]
        .map(|ip| format!("IP:{ip}"))
        .to_vec();
    names.extend(DNS_NAMES.map(|name| format!("DNS:{name}")));
    let serving = certs.server("apiserver", &names)?;
    let kubelet = certs.client(
        "apiserver-kubelet",
        "kube-apiserver-kubelet-client",
        &["system:masters"],
    )?;
    let proxy = certs.client("front-proxy", "front-proxy", &[])?;
    let (ca, key) = (certs.ca(), certs.service_account_key());
    Ok(vec![
        path_flag("tls-cert-file", &serving.cert),
        path_flag("tls-private-key-file", &serving.key),
        path_flag("client-ca-file", &ca),
        path_flag("service-account-key-file", &key),
        path_flag("service-account-signing-key-file", &key),
        path_flag("kubelet-client-certificate", &kubelet.cert),
        path_flag("kubelet-client-key", &kubelet.key),
        path_flag("requestheader-client-ca-file", &ca),
        path_flag("proxy-client-cert-file", &proxy.cert),
        path_flag("proxy-client-key-file", &proxy.key),
    ])
}

fn path_flag(flag: &str, path: &Path) -> String {
    format!("--{flag}={}", path.display())
}

fn audit_policy() -> String {
    serde_json::json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "None", "resources": [{ "group": "coordination.k8s.io", "resources": ["leases"] }] },
            { "level": "Metadata", "verbs": ["get", "list"], "users": [MANAGER_USER] },
            { "level": "None", "verbs": ["get", "list", "watch"] },
            { "level": "Metadata" },
        ],
    })
    .to_string()
}
