//! The Helm chart: what it renders, and its releases on a real API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod openkruise;
mod releases;
mod rendering;
mod values;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;
use testbed::cluster::prepare::{self, Part};
use testbed::cluster::{Cache, ControlPlane};

/// Writes objects as Helm 4 does by default.
const SERVER_SIDE: &str = "--server-side=true";
/// Writes objects as Helm 3 does; Helm 4 goes on with it in releases of Helm 3.
const CLIENT_SIDE: &str = "--server-side=false";

/// Where the images of the tests would be.
const REGISTRY: &str = "registry.example/kruise-rs";

/// Path below the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn chart() -> String {
    repository("deploy/helm/kruise").display().to_string()
}

/// Runs a command; the error is its standard error.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

/// A helm command that reads and writes no settings of the user.
fn helm_command(home: &Path) -> Command {
    let cache = Cache::open().unwrap();
    prepare::ensure(&cache, &[Part::Helm]).unwrap();
    let mut command = Command::new(cache.helm());
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(name, home);
    }
    command.env("HELM_NAMESPACE", "default");
    command
}

/// Runs helm on a cluster.
fn helm(plane: &ControlPlane, args: &[&str]) -> Result<String, String> {
    let mut command = helm_command(&plane.dir().join("helm"));
    run(command.env("KUBECONFIG", plane.kubeconfig()).args(args))
}

/// A file of values that name images, as each user must; all other values have their defaults.
fn image_values(folder: &Path) -> String {
    let file = folder.join("values.yaml");
    let image = |program: &str| format!("image: {{repository: {REGISTRY}/{program}}}");
    let values = format!(
        "manager:\n  {}\ndaemon:\n  {}\n",
        image("kruise-manager"),
        image("kruise-daemon")
    );
    fs::write(&file, values).unwrap();
    file.display().to_string()
}

/// Renders the chart without a cluster.
fn template(args: &[&str]) -> Result<Objects, String> {
    let home = tempfile::tempdir().unwrap();
    let images = image_values(home.path());
    template_chart(&chart(), &[&["--values", &images], args].concat())
}

/// Renders a chart without a cluster, with these values alone.
fn template_chart(chart: &str, args: &[&str]) -> Result<Objects, String> {
    let home = tempfile::tempdir().unwrap();
    let mut command = helm_command(home.path());
    let rendered = run(command.args(["template", "kruise", chart]).args(args))?;
    Ok(objects(&rendered))
}

/// Objects by kind, namespace and name.
type Objects = BTreeMap<String, Value>;

/// The objects in YAML documents.
fn objects(text: &str) -> Objects {
    let documents = serde_yaml::Deserializer::from_str(text);
    let documents = documents.map(|document| Value::deserialize(document).unwrap());
    let found = documents.filter(|object| !object.is_null());
    found.map(|object| (key(&object), object)).collect()
}

fn key(object: &Value) -> String {
    let metadata = &object["metadata"];
    let parts = [&object["kind"], &metadata["namespace"], &metadata["name"]];
    parts.map(|part| part.as_str().unwrap_or_default()).join("/")
}
