// A daemon around the library of the stargz-snapshotter, for bench/stargz.py: Debian packages the
// library and ctr-remote, not containerd-stargz-grpc. It puts together what that does with the
// default configuration and a registry that speaks plain HTTP.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/contrib/snapshotservice"
	"github.com/containerd/containerd/reference"
	"github.com/containerd/containerd/remotes/docker"
	"github.com/containerd/stargz-snapshotter/fs"
	"github.com/containerd/stargz-snapshotter/fs/config"
	"github.com/containerd/stargz-snapshotter/fs/source"
	"github.com/containerd/stargz-snapshotter/snapshot"
	"github.com/hashicorp/go-retryablehttp"
	"google.golang.org/grpc"
)

func main() {
	address := flag.String("address", "", "path of the socket")
	root := flag.String("root", "", "directory of the snapshots")
	flag.Parse()

	client := retryablehttp.NewClient()
	client.Logger = nil
	registries := docker.ConfigureDefaultRegistries(
		docker.WithPlainHTTP(docker.MatchAllHosts), docker.WithClient(client.StandardClient()))
	hosts := func(image reference.Spec) ([]docker.RegistryHost, error) { return registries(image.Hostname()) }

	ctx := context.Background()
	lazy, err := fs.NewFilesystem(
		filepath.Join(*root, "stargz"), config.Config{}, fs.WithGetSources(source.FromDefaultLabels(hosts)))
	if err != nil {
		log.Fatal(err)
	}
	snapshots, err := snapshot.NewSnapshotter(
		ctx, filepath.Join(*root, "snapshotter"), lazy, snapshot.AsynchronousRemove)
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", *address)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshots))
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		server.Stop()
	}()
	if err := server.Serve(listener); err != nil {
		log.Print(err)
	}
	if err := snapshots.Close(); err != nil { // unmounts what FUSE shows
		log.Fatal(err)
	}
}
