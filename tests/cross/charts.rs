//! CloneSets of many templates: created under the Go manager, applied again under ours, and under the Go manager once
//! more.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use testbed::cluster::{ControlPlane, TokenBinding, run_command, wait};
use testbed::port;

use crate::interop_cluster::WAIT_TIMEOUT;
use crate::takeover::services_instead_of_urls;
use support::charts::{ApplyMethod, Charts};
use support::connect::connect;
use support::conversion::{CONVERTED_KINDS, wait_for_conversion};
use support::manager::Manager;
use support::readiness::is_ready;

/// The Go manager on the API server alone; stopped on drop.
pub struct GoManager(u32);

/// Runs a command of the Go implementation's script.
fn run_peer_script(plane: &ControlPlane, kubeconfig: &Path, verb: &str, env: &[(&str, String)]) -> String {
    let dir = PathBuf::from(std::env::var_os("KRUISE_PEER").unwrap());
    let kubectl = plane.kubectl_command().get_program().to_owned();
    let tools = Path::new(&kubectl).parent().unwrap().display().to_string();
    let mut command = Command::new("bash");
    command
        .arg(dir.join("run.sh"))
        .arg(verb)
        .env("KUBECONFIG", kubeconfig)
        .env("DIR", plane.dir().join("peer"))
        .env("PATH", format!("{tools}:{}", std::env::var("PATH").unwrap()))
        .envs(env.iter().map(|(name, value)| (name, value)));
    run_command(&mut command).unwrap()
}

impl GoManager {
    /// With all feature gates that do not change the format of what it stores.
    pub fn start(plane: &ControlPlane) -> Self {
        Self::start_with(plane, &[])
    }

    /// With these feature gates.
    pub fn start_with_gates(plane: &ControlPlane, gates: &str) -> Self {
        Self::start_with(plane, &[("GATES", gates.to_owned())])
    }

    fn start_with(plane: &ControlPlane, env: &[(&str, String)]) -> Self {
        run_peer_script(plane, plane.kubeconfig(), "install", &[]);
        let account = plane
            .kubeconfig_for("kruise-system", "kruise-manager", TokenBinding::Unbound)
            .unwrap();
        let ports = [(); 3].map(|()| port::reserve().unwrap());
        let names = ["WEBHOOK_PORT", "METRICS_PORT", "HEALTH_PORT"];
        let ports_env = names.into_iter().zip(ports.map(|port| port.to_string()));
        let env: Vec<_> = ports_env.chain(env.iter().cloned()).collect();
        let pid = run_peer_script(plane, &account, "manager", &env)
            .trim()
            .parse()
            .unwrap();
        let manager = Self(pid);
        let health = format!("127.0.0.1:{}", ports[2]);
        let healthy = || Ok(is_ready(&health).then_some(()));
        wait::until("the Go manager is ready", WAIT_TIMEOUT, healthy).unwrap();
        manager
    }
}

impl Drop for GoManager {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = run_command(Command::new("kill").arg(self.0.to_string()));
        let exited = || Ok((!Path::new(&format!("/proc/{}", self.0)).exists()).then_some(()));
        let _ = wait::until("the Go manager has ended", Duration::from_secs(30), exited);
    }
}

fn deploy(plane: &ControlPlane, verb: &str, folder: &str) {
    let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&[verb, "-k", &path]).unwrap();
}

/// Starts our manager in place of the Go one; returns when it is leader.
pub fn take_over(plane: &ControlPlane) -> Manager {
    start_rust_manager(plane, Manager::with_default_gates(plane, "kruise-manager"))
}

/// The same with this manager, which is not started yet.
pub fn start_rust_manager(plane: &ControlPlane, mut manager: Manager) -> Manager {
    deploy(plane, "apply", "default");
    manager.start().unwrap();
    manager.wait_for_readyz_text("leading");
    wait_for_conversion(plane, &CONVERTED_KINDS);
    manager
}

fn return_to_go(plane: &ControlPlane) -> GoManager {
    for folder in ["manager", "policies", "webhooks"] {
        deploy(plane, "delete", folder);
    }
    deploy(plane, "apply", "crds");
    services_instead_of_urls(plane);
    GoManager::start(plane)
}

#[tokio::test]
async fn chart_templates_survive_takeover_and_return() {
    let plane = &ControlPlane::start().unwrap();
    let admin = &connect(plane.kubeconfig()).await;
    let go_manager = GoManager::start(plane);
    let charts_by_version = [("beta", "v1beta1"), ("alpha", "v1alpha1")]
        .map(|(namespace, version)| Charts::new(plane, admin, namespace, version));
    let mut kept_before = Vec::new();
    for charts in &charts_by_version {
        charts.apply_all(plane, ApplyMethod::ClientSide, None).await;
        charts.wait_observed("made").await;
        kept_before.push(charts.stable_identities().await);
    }
    drop(go_manager);

    let mut rust_manager = take_over(plane);
    let (second, third) = ("registry.example.com/next:2", "registry.example.com/next:3");
    for (charts, kept_before) in charts_by_version.iter().zip(kept_before) {
        charts.wait_observed("taken over").await;
        assert_eq!(
            charts.stable_identities().await,
            kept_before,
            "{}: taken over",
            charts.namespace
        );
        charts.assert_reapply_is_noop(plane, None, "ours").await;
        charts.assert_in_place_image_update(plane, second, "ours").await;
    }
    // While the webhook is down, the manager stores the defaults.
    deploy(plane, "delete", "webhooks");
    for charts in &charts_by_version {
        let before = charts.stable_identities().await;
        charts
            .apply_all(plane, ApplyMethod::ClientSide, Some(second))
            .await;
        charts.wait_defaulted().await;
        charts.wait_observed("without a webhook").await;
        assert_eq!(
            charts.stable_identities().await,
            before,
            "{}: without a webhook",
            charts.namespace
        );
    }
    deploy(plane, "apply", "webhooks");
    let mut kept_before = Vec::new();
    for charts in &charts_by_version {
        kept_before.push(charts.stable_identities().await);
    }
    rust_manager.stop().unwrap();

    let _theirs = return_to_go(plane);
    for (charts, kept_before) in charts_by_version.iter().zip(kept_before) {
        charts.wait_observed("taken back").await;
        assert_eq!(
            charts.stable_identities().await,
            kept_before,
            "{}: taken back",
            charts.namespace
        );
        charts
            .assert_reapply_is_noop(plane, Some(second), "theirs again")
            .await;
        charts
            .assert_in_place_image_update(plane, third, "theirs again")
            .await;
    }
}
