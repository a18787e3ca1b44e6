//! A connection to a bed's API server, as whom a kubeconfig says.

use std::path::Path;

use kruise_cluster::{Cluster, Options};

pub async fn connect(kubeconfig: &Path) -> Cluster {
    let options = Options {
        kubeconfig: Some(kubeconfig.to_owned()),
        component: "test".into(),
        host: None,
    };
    Cluster::connect(&options).await.unwrap()
}
