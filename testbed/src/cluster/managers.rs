//! kube-controller-manager and kube-scheduler.

use std::path::Path;
use std::sync::Arc;

use super::certs::Certs;
use super::component::Component;
use crate::parts::Cache;
use crate::sandbox::Sandbox;

pub(super) fn controller_manager(
    cache: &Cache,
    sandbox: &Arc<Sandbox>,
    certs: &Certs,
    admin: &Path,
    port: u16,
) -> Component {
    let path_flag = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    Component::new(
        sandbox,
        "kube-controller-manager",
        cache.kubernetes("kube-controller-manager"),
    )
    .args([
        path_flag("kubeconfig", admin),
        path_flag("service-account-private-key-file", &certs.service_account_key()),
        path_flag("root-ca-file", &certs.ca()),
        format!("--secure-port={port}"),
        "--bind-address=127.0.0.1".into(),
        "--use-service-account-credentials=true".into(),
        "--leader-elect=false".into(),
        "--kube-api-qps=200".into(),
        "--kube-api-burst=400".into(),
        "--node-monitor-period=2s".into(),
        "--horizontal-pod-autoscaler-sync-period=1s".into(),
        "--enable-hostpath-provisioner=true".into(),
    ])
}

pub(super) fn scheduler(cache: &Cache, sandbox: &Arc<Sandbox>, admin: &Path, port: u16) -> Component {
    Component::new(sandbox, "kube-scheduler", cache.kubernetes("kube-scheduler")).args([
        format!("--kubeconfig={}", admin.display()),
        format!("--secure-port={port}"),
        "--bind-address=127.0.0.1".into(),
        "--leader-elect=false".into(),
        "--kube-api-qps=1000".into(),
        "--kube-api-burst=1000".into(),
    ])
}
