//! `kubectl kruise node`: image pulls, recreates and probes of one node, as its daemon reports them.
//!
//! In:  NodeImage and NodePodProbe of the node, the ContainerRecreateRequests with its label.
//! Out: tables or JSON, once or with `--watch` at every change until nothing reads them; exit code 1 if a part could not
//!      be read.

pub mod plan;

use std::time::Duration;

use futures::join;
use k8s_openapi::api::core::v1::Node;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys::{CRR_NODE_NAME, node_label};
use kruise_api::node_image::NodeImage;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::text::printable;
use kruise_cluster::write;
use kube::Api;
use kube::api::ListParams;

use super::client::{Connection, ScopeOptions, list};
use super::error::Error;
use super::output::{
    Cell, OutputOptions, Tone, colours, json, paint, print, print_while_read, reader_closed, stdout_pipe,
    table, unread,
};
use super::signals::interrupted;
use plan::{NodeStatus, Pull, Recreate};

/// What errors are about.
const NODE_IMAGE: &str = "NodeImage";
const NODE_POD_PROBE: &str = "NodePodProbe";
const REQUESTS: &str = "ContainerRecreateRequests";

/// Options of `node`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Name of the node
    #[arg(value_name = "NODE", value_parser = super::arguments::object_name)]
    node: String,

    /// Print it again at every change, until interrupted or until the output is closed
    #[arg(short, long)]
    watch: bool,

    #[command(flatten)]
    scope: ScopeOptions,

    #[command(flatten)]
    output: OutputOptions,
}

/// Time between two reads with `--watch`: three requests each.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Prints what happens on the node.
pub async fn run(connection: &Connection, options: Options) -> Result<(), Error> {
    let connection = &connection.in_scope(options.scope);
    let is_json = options.output.output.is_some();
    let render = |status: &NodeStatus| match is_json {
        true => format!("{}\n", json(status)),
        false => render(status, colours()),
    };
    let pipe = options.watch.then(stdout_pipe).flatten();
    let status = read(connection, options.node.clone()).await?;
    let mut shown = render(&status);
    if options.watch {
        let watching = async {
            let mut is_read = print_while_read(&shown)?;
            while is_read {
                tokio::time::sleep(WATCH_INTERVAL).await;
                let now = render(&read(connection, options.node.clone()).await?);
                if now != shown {
                    // JSON documents follow each other, as those of kubectl do.
                    let gap = if is_json { "" } else { "\n" };
                    is_read = print_while_read(&format!("{gap}{now}"))?;
                    shown = now;
                }
            }
            Ok::<(), Error>(())
        };
        return tokio::select! {
            ended = watching => ended,
            // A reader that is gone has read enough.
            () = reader_closed(pipe) => Ok(()),
            () = interrupted() => Err(Error::Interrupted("interrupted".to_owned())),
        };
    }
    print(&shown);
    match status.errors.len() {
        0 => Ok(()),
        count => Err(Error::Failed(format!(
            "{count} part(s) of the node's status could not be read"
        ))),
    }
}

async fn read(connection: &Connection, node: String) -> Result<NodeStatus, Error> {
    let client = &connection.client;
    let images = Api::<NodeImage>::all(client.clone());
    let probes = Api::<NodePodProbe>::all(client.clone());
    let (image, probes, recreates) = join!(
        write::get(&images, &node),
        write::get(&probes, &node),
        list_recreates(connection, &node),
    );
    let mut status = NodeStatus {
        node,
        ..NodeStatus::default()
    };
    match image {
        Ok(Some(image)) => {
            status.runtime_error = plan::runtime_error(&image);
            (status.pulls, status.pulled) = plan::pulls(&image);
        }
        Ok(None) => status
            .errors
            .push(missing_node_image(connection, &status.node).await?),
        Err(error) => status
            .errors
            .push(format!("{NODE_IMAGE}: {}", Error::from(error).text())),
    }
    match probes {
        Ok(probes) => status.probes = probes.as_ref().map(plan::probe_counts).unwrap_or_default(),
        // The kind is newer than others.
        Err(error) if error.not_found() => {}
        Err(error) => status
            .errors
            .push(format!("{NODE_POD_PROBE}: {}", Error::from(error).text())),
    }
    match recreates {
        Ok((recreates, unreadable)) => {
            status.recreates = recreates;
            status.errors.extend(unreadable);
        }
        Err(error) => status.errors.push(format!("{REQUESTS}: {}", error.text())),
    }
    Ok(status)
}

/// Why a node has no NodeImage.
async fn missing_node_image(connection: &Connection, node: &str) -> Result<String, Error> {
    let nodes = Api::<Node>::all(connection.client.clone());
    match write::get(&nodes, node).await {
        Ok(None) => Err(Error::NotFound {
            plural: "nodes".to_owned(),
            name: node.to_owned(),
        }),
        _ => Ok(format!(
            "{NODE_IMAGE}: not found; kruise-manager creates it when the node is ready"
        )),
    }
}

async fn list_recreates(connection: &Connection, node: &str) -> Result<(Vec<Recreate>, Vec<String>), Error> {
    let requests = connection.api_of_scope::<ContainerRecreateRequest>();
    let params = ListParams::default().labels(&format!("{CRR_NODE_NAME}={}", node_label(node)));
    let mut found = Vec::new();
    let each = |request: ContainerRecreateRequest| found.extend(plan::recreate(&request));
    let unreadable = list(&requests, params, each).await?;
    Ok((found, unreadable))
}

/// The status as tables.
fn render(status: &NodeStatus, colours: bool) -> String {
    let unknown = |what: &str| status.errors.iter().any(|error| error.starts_with(what));
    let mut text = String::new();
    if !status.runtime_error.is_empty() {
        let error = printable(&status.runtime_error);
        text += &format!("{}\n\n", paint(&error, Tone::Bad, colours));
    }
    if unknown(NODE_IMAGE) {
        text += "Image pulls: unknown.\n";
    } else if status.pulls.is_empty() {
        text += &format!("Image pulls: none; {} image(s) are on the node.\n", status.pulled);
    } else {
        let rows: Vec<[Cell; 4]> = status.pulls.iter().map(pull_row).collect();
        text += &table(["IMAGE", "PHASE", "PROGRESS", "MESSAGE"], &rows, colours);
        text += &format!("{} more image(s) are on the node.\n", status.pulled);
    }
    if status.recreates.is_empty() && unknown(REQUESTS) {
        text += "\nContainerRecreateRequests: unknown.\n";
    } else if status.recreates.is_empty() {
        text += "\nContainerRecreateRequests: none.\n";
    } else {
        let rows: Vec<[Cell; 6]> = status.recreates.iter().map(recreate_row).collect();
        let header = ["NAMESPACE", "REQUEST", "POD", "CONTAINERS", "STATE", "MESSAGE"];
        text += &format!("\n{}", table(header, &rows, colours));
    }
    let probes = &status.probes;
    text += &match probes.total {
        0 if unknown(NODE_POD_PROBE) => "\nPod probes: unknown.\n".to_owned(),
        0 => "\nPod probes: none.\n".to_owned(),
        total => format!(
            "\nPod probes: {total} in {} Pod(s): {} succeeded, {} failed, {} unknown.\n",
            probes.pods, probes.succeeded, probes.failed, probes.unknown
        ),
    };
    text + &unread(&status.errors, colours)
}

fn tone(state: &str) -> Tone {
    if state == "Failed" {
        Tone::Bad
    } else {
        Tone::Pending
    }
}

fn pull_row(pull: &Pull) -> [Cell; 4] {
    [
        pull.image.clone().into(),
        Cell::toned(pull.phase.clone(), tone(&pull.phase)),
        format!("{}%", pull.progress).into(),
        pull.message.clone().into(),
    ]
}

fn recreate_row(recreate: &Recreate) -> [Cell; 6] {
    [
        recreate.namespace.clone().into(),
        recreate.name.clone().into(),
        recreate.pod.clone().into(),
        recreate.containers.join(",").into(),
        Cell::toned(recreate.state.clone(), tone(&recreate.state)),
        recreate.message.clone().into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_that_does_not_answer_comes_first() {
        let status = NodeStatus {
            runtime_error: "container runtime is down:\nx".to_owned(),
            ..NodeStatus::default()
        };
        let text = render(&status, false);
        let expected = "container runtime is down:\\nx\n\nImage pulls: none;";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn what_could_not_be_read_is_unknown() {
        let mut status = NodeStatus::default();
        let text = render(&status, false);
        assert_eq!(text.matches("none").count(), 3, "{text}");
        let errors = [NODE_IMAGE, NODE_POD_PROBE, REQUESTS];
        status.errors = errors.map(|what| format!("{what}: forbidden")).into();
        let text = render(&status, false);
        assert_eq!(text.matches(": unknown.").count(), 3, "{text}");
        assert!(!text.contains("none"), "{text}");
    }
}
