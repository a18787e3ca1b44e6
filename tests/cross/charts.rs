//! CloneSets of many templates: made under the Go manager, applied again under ours, and under it once more.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use testbed::cluster::{Bound, ControlPlane, finish, wait};
use testbed::port;

use crate::bed::PATIENCE;
use crate::take_over::services_instead_of_urls;
use support::charts::{Charts, How};
use support::connect::connect;
use support::converted::{ALL, until_converted};
use support::manager::Manager;
use support::readiness::ready;

/// The Go manager on the API server alone; ends on drop.
pub struct Theirs(u32);

/// Runs a command of the Go implementation's script.
fn script(plane: &ControlPlane, kubeconfig: &Path, verb: &str, ports: [u16; 3]) -> String {
    let dir = PathBuf::from(std::env::var_os("KRUISE_PEER").unwrap());
    let kubectl = plane.kubectl_command().get_program().to_owned();
    let tools = Path::new(&kubectl).parent().unwrap().display().to_string();
    let names = ["WEBHOOK_PORT", "METRICS_PORT", "HEALTH_PORT"];
    let mut command = Command::new("bash");
    command
        .arg(dir.join("run.sh"))
        .arg(verb)
        .env("KUBECONFIG", kubeconfig)
        .env("DIR", plane.dir().join("peer"))
        .env("PATH", format!("{tools}:{}", std::env::var("PATH").unwrap()))
        .envs(names.into_iter().zip(ports.map(|port| port.to_string())));
    finish(&mut command).unwrap()
}

impl Theirs {
    pub fn start(plane: &ControlPlane) -> Self {
        script(plane, plane.kubeconfig(), "install", [0; 3]);
        let account = plane
            .kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing)
            .unwrap();
        let ports = [(); 3].map(|()| port::reserve().unwrap());
        let pid = script(plane, &account, "manager", ports).trim().parse().unwrap();
        let theirs = Self(pid);
        let health = format!("127.0.0.1:{}", ports[2]);
        let healthy = || Ok(ready(&health).then_some(()));
        wait::until("the Go manager is ready", PATIENCE, healthy).unwrap();
        theirs
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = finish(Command::new("kill").arg(self.0.to_string()));
        let gone = || Ok((!Path::new(&format!("/proc/{}", self.0)).exists()).then_some(()));
        let _ = wait::until("the Go manager has ended", Duration::from_secs(30), gone);
    }
}

fn deploy(plane: &ControlPlane, verb: &str, folder: &str) {
    let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&[verb, "-k", &path]).unwrap();
}

/// Our manager in the place of the Go one, once it leads.
pub fn take_over(plane: &ControlPlane) -> Manager {
    deploy(plane, "apply", "default");
    let mut ours = Manager::as_shipped(plane, "kruise-manager");
    ours.start().unwrap();
    ours.until_it_says("leading");
    until_converted(plane, &ALL);
    ours
}

fn back(plane: &ControlPlane) -> Theirs {
    for folder in ["manager", "policies", "webhooks"] {
        deploy(plane, "delete", folder);
    }
    deploy(plane, "apply", "crds");
    services_instead_of_urls(plane);
    Theirs::start(plane)
}

#[tokio::test]
async fn templates_of_charts_go_over_and_back_without_a_change() {
    let plane = &ControlPlane::start().unwrap();
    let admin = &connect(plane.kubeconfig()).await;
    let theirs = Theirs::start(plane);
    let all = [("beta", "v1beta1"), ("alpha", "v1alpha1")]
        .map(|(namespace, version)| Charts::new(plane, admin, namespace, version));
    let mut left = Vec::new();
    for charts in &all {
        charts.write(plane, How::ClientSide, None).await;
        charts.settled("made").await;
        left.push(charts.kept().await);
    }
    drop(theirs);

    let mut ours = take_over(plane);
    let (second, third) = ("registry.example.com/next:2", "registry.example.com/next:3");
    for (charts, left) in all.iter().zip(left) {
        charts.settled("taken over").await;
        assert_eq!(charts.kept().await, left, "{}: taken over", charts.namespace);
        charts.nothing_changes(plane, None, "ours").await;
        charts.image_changes_in_place(plane, second, "ours").await;
    }
    // While the webhook is away, what the manifests leave out is stored by the manager.
    deploy(plane, "delete", "webhooks");
    for charts in &all {
        let before = charts.kept().await;
        charts.write(plane, How::ClientSide, Some(second)).await;
        charts.filled_in().await;
        charts.settled("without a webhook").await;
        assert_eq!(
            charts.kept().await,
            before,
            "{}: without a webhook",
            charts.namespace
        );
    }
    deploy(plane, "apply", "webhooks");
    let mut left = Vec::new();
    for charts in &all {
        left.push(charts.kept().await);
    }
    ours.stop().unwrap();

    let _theirs = back(plane);
    for (charts, left) in all.iter().zip(left) {
        charts.settled("taken back").await;
        assert_eq!(charts.kept().await, left, "{}: taken back", charts.namespace);
        charts.nothing_changes(plane, Some(second), "theirs again").await;
        charts.image_changes_in_place(plane, third, "theirs again").await;
    }
}
